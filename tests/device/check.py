"""One run on a machine with one GPU, under five minutes, into one JSON file.

    python -m tests.device.check --out device.json                      # everything, true LLaVA-1.5-7B sizes
    python -m tests.device.check --device cpu --geometry tiny --driver STAND-IN --out dry.json    # a dry run

Every section stands alone: one that fails is noted with its error, and the others go on. Weights are random; the
figures are times and ratios to what the hardware could do (`floor_ms`, from bytes and operations).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.device import decoder, encoder, facts, journey, transport
from tests.device.setting import GEOMETRIES, Setting

SECTIONS: dict[str, Callable[[Setting], dict[str, object]]] = {
    "facts": facts.run,
    "transport": transport.run,
    "encoder": encoder.run,
    "decoder": decoder.run,
    "journey": journey.run,
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.device.check", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--geometry", choices=tuple(GEOMETRIES), default="llava-1.5-7b")
    parser.add_argument("--driver", default="libcuda.so.1", help="NVIDIA's driver library, or the stand-in's path")
    parser.add_argument("--sections", nargs="+", choices=tuple(SECTIONS), default=list(SECTIONS))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the sections; 1 if one failed."""
    given = parse(argv)
    setting = Setting(given.device, GEOMETRIES[given.geometry], given.driver)
    result: dict[str, object] = {
        "geometry": given.geometry,
        "device": given.device,
        "python": platform.python_version(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "sections": {},
    }
    is_whole = True
    for name in given.sections:
        began = time.monotonic()
        try:
            found = SECTIONS[name](setting)
        except Exception as error:  # the run costs minutes of a machine that is lent: the other sections go on
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
            is_whole = False
        found["seconds"] = round(time.monotonic() - began, 2)
        result["sections"][name] = found  # type: ignore[index]
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=2) + "\n")  # after each one: a cut-off run keeps what it has
        print(f"{name}: {'failed' if 'error' in found else 'done'} in {found['seconds']} s", flush=True)
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
