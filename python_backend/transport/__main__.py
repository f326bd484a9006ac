"""`python -m python_backend.transport probe 0 1`: how embeddings come from GPU 0 to a process on GPU 1, as JSON.

`open` is the other side of it, which `probe` starts itself.
"""

from __future__ import annotations

import argparse
import json
import sys

from python_backend.transport.cuda import CudaError, CudaMissing, Driver
from python_backend.transport.probe import NUM_BYTES, open_and_copy, probe


def main(argv: list[str] | None = None) -> int:
    """The command line; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m python_backend.transport", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("probe")
    command.add_argument("encoder", type=int)
    command.add_argument("decoder", type=int)
    command.add_argument("--bytes", type=int, default=NUM_BYTES)
    command = commands.add_parser("open")
    command.add_argument("decoder", type=int)
    command.add_argument("handle", type=bytes.fromhex)
    command.add_argument("bytes", type=int)
    command.add_argument("digest")
    given = parser.parse_args(argv)
    try:
        driver = Driver.load()
        if given.command == "probe":
            print(probe(driver, given.encoder, given.decoder, num_bytes=given.bytes).model_dump_json())
        else:
            print(json.dumps(open_and_copy(driver, given.decoder, given.handle, given.bytes, given.digest)))
    except (CudaMissing, CudaError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
