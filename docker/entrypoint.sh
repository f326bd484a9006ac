#!/bin/sh
# Starts a command of vlm-relay in a container. `serve` and `up` find the GPUs, build what is missing, render, serve,
# and drain on SIGTERM; this only chooses a profile and a place to write.
#
#   VLM_RELAY_PROFILE     a profile; default: by the number of GPUs
#   VLM_RELAY_CHECKPOINT  a LLaVA folder, mounted read only; default: the demo's
#   VLM_RELAY_STATE       where engines and compiled operators are kept; default: /var/lib/vlm-relay, else /tmp
#   VLM_RELAY_HOST        address to listen on; default: 0.0.0.0
set -eu

profiles="$(cd "$(dirname "$0")/../deploy/profiles" && pwd)"

fail() {
    echo "entrypoint: $1" >&2
    exit 2
}

state="${VLM_RELAY_STATE:-/var/lib/vlm-relay}"
if [ ! -w "$state" ]; then
    [ -z "${VLM_RELAY_STATE:-}" ] || fail "VLM_RELAY_STATE: $state cannot be written by user $(id -u)"
    state=/tmp/vlm-relay
    mkdir -p "$state" || fail "neither /var/lib/vlm-relay nor /tmp can be written; mount a volume or a tmpfs on one"
fi
# Compiled operators and kernels go below the home folder; a user id without an entry in passwd has none.
export HOME="$state" XDG_CACHE_HOME="$state/cache" TRITON_CACHE_DIR="$state/cache/triton"

count_gpus() {
    command -v nvidia-smi >/dev/null || { echo 0; return; }
    timeout 60 nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ' || true
}

choose_profile() {
    gpus="$(count_gpus)"
    case "$gpus" in
        0) echo "$profiles/cpu.toml" ;;
        1) echo "$profiles/one_gpu.toml" ;;
        2) echo "$profiles/two_gpu.toml" ;;
        8) echo "$profiles/eight_gpu.toml" ;;
        *) fail "no profile for $gpus GPUs; set VLM_RELAY_PROFILE" ;;
    esac
}

command="${1:-serve}"
[ "$#" -eq 0 ] || shift
case "$command" in
    serve | up)
        profile="${VLM_RELAY_PROFILE:-}"
        [ -n "$profile" ] || profile="$(choose_profile)"
        [ -f "$profile" ] || fail "VLM_RELAY_PROFILE: $profile is not a file"
        [ -z "${VLM_RELAY_CHECKPOINT:-}" ] || set -- --checkpoint "$VLM_RELAY_CHECKPOINT" "$@"
        set -- --profile "$profile" --artifacts "$state/artifacts" --host "${VLM_RELAY_HOST:-0.0.0.0}" "$@"
        ;;
esac
exec vlm-relay "$command" "$@"
