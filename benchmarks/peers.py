"""Fetch the peers that the benchmarks compare with, where there is a network: `python -m benchmarks.peers [DIR]`.

DIR (default .peers, which git ignores) then holds the whole of diffusers and the one file of sglang that is measured.
A GPU machine without a network needs nothing else. Nothing of a peer is committed.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

DIFFUSERS = "diffusers==0.42.1"
SGLANG = "sglang==0.5.23"
SGLANG_FILE = "sglang/kernels/ops/diffusion/attention/sana_wm_gdn_chunkwise_triton.py"


def fetch(requirement: str, members: str, folder: Path) -> None:
    """Download one wheel without its dependencies and unpack the members whose path starts with `members`."""
    with tempfile.TemporaryDirectory() as download:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", download]
            + [requirement],
            check=True,
        )
        (wheel,) = Path(download).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith(members)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(".peers"))
    folder = parser.parse_args().folder
    fetch(DIFFUSERS, "diffusers", folder)
    fetch(SGLANG, SGLANG_FILE, folder)
    print(f"{DIFFUSERS} and {SGLANG_FILE} of {SGLANG} are in {folder}")


if __name__ == "__main__":
    main()
