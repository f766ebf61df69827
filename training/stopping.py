"""How a run ends before its last step: asked by a signal, or because the launcher that started it is gone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

EXIT_CODES = {signal.SIGTERM: 0, signal.SIGINT: 130}
"""SIGTERM is a scheduler's request, which was answered; 130 is what a shell expects of an interrupted program."""

IMPATIENCE = 2.0
"""A second SIGINT so many seconds after the first ends the process at once. Launchers may send the first one twice."""


class _Interruption(BaseException):
    """Raised by a signal inside `Stop.interruptible`, and caught there."""


class Stop:
    """SIGTERM, SIGINT and the death of the launcher as a request to end. A context manager, for the main thread.

    A signal before training ends the process at once, since there is nothing to save; after `training` is set it waits
    for the end of the step. A launcher may be killed without a word to the processes that it started: they are asked
    to end then, as by SIGTERM.

    Args:
        launcher: the process that started this one and will not end before it; None if that may happen, as with a
            shell.
        patience: seconds after the launcher's death after which a process that hangs is ended.

    Attributes:
        code: the exit code of what asked this process to end; None while nothing has.
        training: whether there is a step to end.
    """

    def __init__(self, launcher: int | None = None, *, patience: float = 600.0) -> None:
        self.code: int | None = None
        self.training = False
        self._is_interruptible = False
        self._asked_at = 0.0
        self._launcher, self._patience = launcher, patience
        self._is_over = threading.Event()
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # the one that signals are for
            self._handlers = {number: signal.signal(number, self._on_signal) for number in EXIT_CODES}
        if self._launcher is not None:
            threading.Thread(target=self._watch_launcher, name="launcher's death", daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._is_over.set()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def interruptible(self, function: Callable[[], T], instead: T) -> T:
        """function(), given up for `instead` when this process is asked to end: what may take long and is optional."""
        if self.code is not None:
            return instead
        try:
            self._is_interruptible = True
            try:
                return function()
            finally:
                self._is_interruptible = False
        except _Interruption:
            return instead

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_impatient = number == signal.SIGINT and self._asked_at and time.monotonic() - self._asked_at > IMPATIENCE
        if self.code is None:
            self.code, self._asked_at = EXIT_CODES[signal.Signals(number)], time.monotonic()
        if not self.training or is_impatient:
            raise SystemExit(self.code)
        if self._is_interruptible:
            self._is_interruptible = False
            raise _Interruption

    def _watch_launcher(self) -> None:
        while os.getppid() == self._launcher:
            if self._is_over.wait(1.0):
                return
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._is_over.wait(self._patience):
            with suppress(OSError):
                os.write(2, b"train.py: the launcher is gone and this process hangs: it ends\n")
            os._exit(1)


def ignore_signals_but_from_parent(worker: int) -> None:
    """For a data loader's worker: launchers signal whole process groups, and the rank still needs its workers.

    Only the rank itself ends them.
    """
    signals, parent = set(EXIT_CODES), os.getppid()
    if not hasattr(signal, "sigwaitinfo"):  # as on macOS, which does not say who sent a signal
        return

    def serve() -> None:
        while signal.sigwaitinfo(signals).si_pid != parent:
            pass
        os._exit(0)

    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    threading.Thread(target=serve, name="signals", daemon=True).start()
