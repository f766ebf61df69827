"""What the command lines share: numbers with a range, and errors as one line."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import TypeVar

from safetensors import SafetensorError

from training.ranks import RankError

Result = TypeVar("Result")


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """argparse's type of an int from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"must be an int from {least} to {most}, got {text!r}")
        return number

    return parse


def positive(text: str) -> float:
    """argparse's type of a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number <= 0:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text!r}")
    return number


#: What is no fault of the program: options, files, a run that diverges, another rank.
ERRORS = (ValueError, OSError, FloatingPointError, SafetensorError, RankError)


def run(name: str, main: Callable[[], Result]) -> Result:
    """What main returns. One of `ERRORS` ends the process with one line on stderr and exit code 1."""
    try:
        return main()
    except ERRORS as error:
        sys.exit(f"{name}: {one_line(error)}")


def one_line(error: BaseException) -> str:
    """An error's message without its line breaks, or its class where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
