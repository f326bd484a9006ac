{{/* The folder of the checkpoint, as the server sees it. */}}
{{- define "vlm-relay.checkpoint" -}}
{{- $model := .Values.model -}}
{{- if eq $model.source "container" -}}
{{- $model.path -}}
{{- else if eq $model.source "hub" -}}
/models/{{ last (splitList "/" $model.hub.repo) }}
{{- else -}}
{{- printf "/models/%s" ($model.path | trimPrefix "/") | trimSuffix "/" -}}
{{- end -}}
{{- end -}}

{{/*
The deployment profile as a table, in YAML: made from the GPUs and the model, `profile` laid over it.
One GPU: both stages on it. More: a decoder on each, encoders beside half of them, placed by the links found at start.
*/}}
{{- define "vlm-relay.profile" -}}
{{- $gpus := int .Values.gpu.count -}}
{{- $model := dict "checkpoint" (include "vlm-relay.checkpoint" .) "artifacts" "/var/cache/vlm-relay" -}}
{{- $profile := dict "model" $model "limits" (dict "drain_s" .Values.server.longestGenerationSeconds) -}}
{{- if gt $gpus 0 -}}
{{- $_ := set $model "encoder_weights_mib" .Values.model.encoderWeightsMib -}}
{{- $_ := set $model "decoder_weights_mib" .Values.model.decoderWeightsMib -}}
{{- range $key, $value := $model }}{{ if eq (toString $value) "0" }}{{ $_ := unset $model $key }}{{ end }}{{ end -}}
{{- $devices := ternary (list "cuda:0") (list "auto") (eq $gpus 1) -}}
{{- $slots := 256 -}}
{{- $slots_mib := div (mul $slots 4608) 1024 -}}
{{- $weights_mib := add .Values.model.encoderWeightsMib .Values.model.decoderWeightsMib -}}
{{- $usable_mib := div (mul (int .Values.gpu.memoryGib) 1024 88) 100 -}}
{{- $kv_mib := sub $usable_mib (add $weights_mib $slots_mib) -}}
{{- if lt (int $kv_mib) 512 -}}
{{- fail (printf "gpu.memoryGib: %d GiB leave %d MiB for the KV cache beside the weights (%d MiB) and the embeddings (%d MiB); at least 512 are needed" (int .Values.gpu.memoryGib) (int $kv_mib) (int $weights_mib) (int $slots_mib)) -}}
{{- end -}}
{{- $encode := dict "replicas" (max 1 (div $gpus 2)) "devices" $devices "runtime" "tensorrt" "dtype" "float16" "slots" $slots -}}
{{- $decode := dict "replicas" $gpus "devices" $devices "dtype" "bfloat16" "max_sequences" 128 "kv_cache_mib" $kv_mib -}}
{{- $_ := set $profile "encode" $encode -}}
{{- $_ := set $profile "decode" $decode -}}
{{- if gt $gpus 1 -}}{{- $_ := set $profile "schedule" (dict "hybrid" true) -}}{{- end -}}
{{- else -}}
{{- $_ := set $profile "encode" (dict "slots" 64) -}}
{{- $_ := set $profile "decode" (dict "max_sequences" 32) -}}
{{- $_ := set $profile.limits "encode_transfer_warn_ms" 1000 -}}
{{- end -}}
{{- mustMergeOverwrite $profile (deepCopy .Values.profile) | toYaml -}}
{{- end -}}

{{/* The same as TOML. Helm reads whole numbers as floats; JSON writes them without a point, as TOML needs. */}}
{{- define "vlm-relay.profileToml" -}}
{{- range $table, $keys := include "vlm-relay.profile" . | fromYaml }}
[{{ $table }}]
{{- range $key, $value := $keys }}
{{- if not (kindIs "invalid" $value) }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}
{{ end }}
{{- end -}}

{{/* A quantity in Mi or Gi as MiB. */}}
{{- define "vlm-relay.mib" -}}
{{- if hasSuffix "Gi" . -}}{{- mul (trimSuffix "Gi" . | int) 1024 -}}{{- else -}}{{- trimSuffix "Mi" . | int -}}{{- end -}}
{{- end -}}

{{/* MiB of /dev/shm: every encoder's slots, and the reserve for Triton's regions. */}}
{{- define "vlm-relay.sharedMemoryMib" -}}
{{- $profile := include "vlm-relay.profile" . | fromYaml -}}
{{- $encoders := int (dig "encode" "replicas" 1 $profile) -}}
{{- $slots := int (dig "encode" "slots" 64 $profile) -}}
{{- $kib := int (dig "model" "embedding_kib" 4608 $profile) -}}
{{- $reserve := include "vlm-relay.mib" .Values.server.sharedMemoryReserve | int -}}
{{- add (div (add (mul $encoders $slots $kib) 1023) 1024) $reserve -}}
{{- end -}}

{{/* Processes and shared memory together: pages of a memory-backed volume count for the container's limit. */}}
{{- define "vlm-relay.serverMemoryMib" -}}
{{- add (include "vlm-relay.mib" .Values.server.memory | int) (include "vlm-relay.sharedMemoryMib" . | int) -}}
{{- end -}}

{{/* How long running requests may take to finish, in whole seconds. */}}
{{- define "vlm-relay.drainSeconds" -}}
{{- dig "limits" "drain_s" 30 (include "vlm-relay.profile" . | fromYaml) | float64 | ceil | int -}}
{{- end -}}

{{/* Leaving, draining, the server's own exit timeout (10 s and 10 s more before it is killed), and some to spare. */}}
{{- define "vlm-relay.graceSeconds" -}}
{{- add .Values.server.leaveSeconds (include "vlm-relay.drainSeconds" . | int) 20 10 -}}
{{- end -}}

{{/* Requests in flight per pod above which another pod is wanted. */}}
{{- define "vlm-relay.inFlightTarget" -}}
{{- $profile := include "vlm-relay.profile" . | fromYaml -}}
{{- $batch := mul (int (dig "decode" "replicas" 1 $profile)) (int (dig "decode" "max_sequences" 32 $profile)) -}}
{{- $most := int (dig "limits" "max_in_flight" 128 $profile) -}}
{{- .Values.server.autoscaling.inFlight | default (max 1 (div (mul (min $batch $most) 8) 10)) -}}
{{- end -}}
