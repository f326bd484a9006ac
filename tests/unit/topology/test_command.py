"""`python -m scheduler.topology`, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests" / "data" / "topology"


def run(*arguments: str, text: bytes = b"", path: str = "/usr/bin:/bin") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "scheduler.topology", *arguments]
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, check=False, env={"PATH": path})


def test_json_has_links_affinities_and_warnings() -> None:
    done = run("--json", str(DATA / "rows_disagree.txt"))

    assert done.returncode == 0
    assert done.stdout.count(b"\n") == 1
    assert json.loads(done.stdout) == {
        "links": {"0-1": "SYS", "0-2": "NODE", "1-2": "NODE"},
        "cpu_affinity": ["0-7", "0-7", "0-7"],
        "numa_affinity": ["0", "0", "0"],
        "warnings": ["GPU0-GPU1: SYS in one row, PIX in the other"],
    }


def test_json_says_unknown_and_null_for_what_is_not_shown() -> None:
    shown = json.loads(run("--json", str(DATA / "header_missing.txt")).stdout)

    assert shown["links"]["0-1"] == "unknown"
    assert shown["cpu_affinity"][:4] == [None, None, None, "0-35,72-107"]


def test_a_table_shows_classes_and_gigabytes_per_second() -> None:
    done = run(str(DATA / "bridged_pairs_stripped.txt"), "--gpu-name", "NVIDIA RTX A6000")

    assert done.stdout.decode().splitlines() == [
        "4 GPUs (source: text)",
        "",
        "Links: class, estimated GB/s one way",
        "      GPU0     GPU1     GPU2     GPU3",
        "GPU0  X        NV4 56   NODE 24  NODE 24",
        "GPU1  NV4 56   X        NODE 24  NODE 24",
        "GPU2  NODE 24  NODE 24  X        NV4 56",
        "GPU3  NODE 24  NODE 24  NV4 56   X",
        "NV#: # bonded NVLinks; NODE: between host bridges of one NUMA node",
        "",
        "GPU   name              NUMA  CPUs  PCIe  bus id",
        "GPU0  NVIDIA RTX A6000  0     0-63  -     -",
        "GPU1  NVIDIA RTX A6000  0     0-63  -     -",
        "GPU2  NVIDIA RTX A6000  0     0-63  -     -",
        "GPU3  NVIDIA RTX A6000  0     0-63  -     -",
    ]


def test_without_a_name_the_table_says_what_is_missing() -> None:
    shown = run(str(DATA / "rows_disagree.txt")).stdout.decode()

    assert "GPU0  X       SYS ?   NODE ?" in shown
    assert "?: not known without the GPU's name" in shown
    assert "warning: GPU0-GPU1: SYS in one row, PIX in the other" in shown


def test_a_dash_reads_standard_input() -> None:
    done = run("-", "--json", text=(DATA / "utf16.txt").read_bytes())

    assert json.loads(done.stdout)["links"] == {"0-1": "PHB", "0-2": "PIX", "1-2": "PHB"}


def test_a_refused_text_is_one_line_and_exit_code_1() -> None:
    file = DATA / "refused_peer_matrix.txt"

    done = run("--json", str(file))

    assert (done.returncode, done.stdout) == (1, b"")
    reason = "this is `nvidia-smi topo -p2p`, which shows permissions; links are shown by `nvidia-smi topo -m`"
    assert done.stderr.decode() == f"vlm-relay topology: {file}: {reason}\n"


def test_a_missing_file_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = run(str(tmp_path / "none.txt"))

    assert done.returncode == 2
    assert done.stderr.decode() == f"vlm-relay topology: cannot read {tmp_path}/none.txt: No such file or directory\n"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    done = run(str(tmp_path))

    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
