"""What the processes of a run tell each other beside training's collectives: small JSON, through torch's store.

A wait here has no time limit, so one rank may encode a folder, validate or write a checkpoint for as long as it takes
while the others wait. It ends as soon as the rank that is waited for has failed or gives no sign of life: a thread of
each rank tells every second what the rank is doing, and an error says of every rank what it was last seen doing, and
its last collective.

There are two stores. Signs of life are in that of torch's process group, which the launcher keeps: they outlive every
rank. What ranks agree upon is in one that the main process keeps: it outlives the launcher, so that ranks which lose
theirs can still write a checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

T = TypeVar("T")

BEAT = 1.0
"""Seconds between two signs of life."""

BEATS_UNTIL_STUCK = 5
"""After so many signs of life at the same line, the next one names the collective that the rank may be waiting in."""

LINGER = 10.0
"""Seconds that the main process waits at its end for the others to end, too."""

NAMED_RANKS = 16
"""How many ranks an error describes."""

ROOT = Path(__file__).parents[1]


class RankError(RuntimeError):
    """A rank failed, died or stalled; the message says which, and what each was last seen doing."""


class Ranks:
    """This rank among the others. A context manager: inside it, this rank gives signs of life.

    Args:
        rank, size: of this process, and how many there are.
        signs: a store that all ranks share, for signs of life; not used by one process alone.
        calls: one for the rest; None: the same.
        stall: seconds in one activity after which the first ranks log what each rank is doing.
        silence: seconds without a sign of life after which nobody waits for a rank any longer. Long, since code that
            keeps Python's lock is silent too.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        signs: dist.Store | None = None,
        calls: dist.Store | None = None,
        *,
        stall: float = 600.0,
        silence: float = 300.0,
    ) -> None:
        self.rank, self.size, self.stall, self.silence = rank, size, stall, silence
        self._calls, self._signs, self._call = calls or signs, signs, 0
        self._activity, self._since, self._is_alone = "starting", time.monotonic(), False
        self._main_thread = threading.get_ident()
        self._is_over, self._has_news = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._give_signs, name="signs of life", daemon=True)
        if self._signs is not None:
            self._give_sign(0, last_collective(by_name=False), "at its start")

    @classmethod
    def joined(cls, *, stall: float) -> Ranks:
        """The ranks of torch's default process group, or this process alone."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        rank, shared = dist.get_rank(), dist.group.WORLD.get_group_store()
        # Keys of this run alone: runs may follow each other in one process group. Every rank counts the same.
        run = f"run{shared.add(f'runs/{rank}', 1)}"
        # A connection of its own: another thread's wait for a key would keep it busy.
        signs = dist.PrefixStore(run, shared.clone())
        calls = _store_of_main_process(rank, signs) or signs
        return cls(rank, dist.get_world_size(), signs, dist.PrefixStore(f"{run}/calls", calls), stall=stall)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def __enter__(self) -> Ranks:
        if self._signs is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self._signs is None:
            return
        self._is_over.set()
        self._has_news.set()
        self._thread.join()
        report = None
        with suppress(RuntimeError):  # the store is gone, with the process that kept it
            ended = "the end of its run" if error is None else f"{type(error).__name__}: {error}"[:500]
            where = _place([frame for frame, _ in walk_tb(traceback)][::-1])
            self._give_sign(-1, last_collective(by_name=error is not None), where, ended)
            report = self.report() if error is not None and is_of_collective(error) else None
        with suppress(RuntimeError):
            self._leave()
        if report is not None:
            raise RankError(f"{report}\nwhich ended this rank's collective: {error}") from error

    def _leave(self) -> None:
        """The main process keeps a store: it stays a little until all others have read what they wait for."""
        assert self._calls is not None
        self._calls.set(f"left/{self.rank}", "")
        deadline = time.monotonic() + LINGER
        for rank in range(self.size if self.is_main else 0):
            while not self._calls.check([f"left/{rank}"]) and time.monotonic() < deadline:
                time.sleep(0.02)

    # --- what ranks tell each other: called on all of them in the same order ----------------------------------------

    def gather(self, value: Any) -> list[Any]:
        """The JSON-able `value` of every rank, by rank."""
        if self._calls is None:
            return [json.loads(json.dumps(value))]
        call = self._call
        self._call += 1
        self._calls.set(f"{call}/{self.rank}", json.dumps(value))
        if self.is_main:
            values = [json.loads(self._wait(self._calls, f"{call}/{rank}", rank)) for rank in range(self.size)]
            self._calls.set(f"{call}", json.dumps(values))
            if call:  # every rank is here, so none reads the last call's keys any more
                for key in (f"{call - 1}", *(f"{call - 1}/{rank}" for rank in range(self.size))):
                    self._calls.delete_key(key)
        return list(json.loads(self._wait(self._calls, f"{call}", 0)))

    def everywhere(self, function: Callable[[], T]) -> T:
        """function() on every rank, and an error on all where any has one.

        Raises:
            ValueError, OSError, FloatingPointError: as `function`; elsewhere with the message of the first rank that
                has one.
        """
        error, result = None, None
        try:
            result = function()
        except tuple(SHARED_ERRORS.values()) as raised:
            error = raised
        kinds = [name for name, kind in SHARED_ERRORS.items() if isinstance(error, kind)]
        errors = [told for told in self.gather([kinds[0], str(error)] if kinds else None) if told is not None]
        if error is not None:
            raise error
        if errors:
            kind, message = errors[0]
            raise SHARED_ERRORS[kind](message)
        return result  # type: ignore[return-value]

    def on_main(self, function: Callable[[], T]) -> T:
        """The JSON-able result of function() on the main process, for all ranks. Errors as `everywhere`."""
        result: T = self.gather(self.everywhere(function if self.is_main else lambda: None))[0]
        return result

    def main_first(self, function: Callable[[], T]) -> T:
        """function() on the main process, then on the others, which may use what it made. Errors as `everywhere`."""
        made = self.everywhere(function if self.is_main else lambda: None)
        return self.everywhere(lambda: made if self.is_main else function())  # type: ignore[return-value]

    # --- who is alive, and where ------------------------------------------------------------------------------------

    def doing(self, activity: str, *, alone: bool = False) -> None:
        """Say what this rank does from now on, such as "step 7, batch 0".

        Args:
            alone: no other rank waits for this one in a collective, so it may take long.
        """
        self._activity, self._since, self._is_alone = activity, time.monotonic(), alone
        self._has_news.set()

    def report(self) -> str:
        """What every rank was last seen doing. It takes three seconds: who is silent in them is dead or stopped."""
        before = [self._sign_of(rank) for rank in range(self.size)]
        time.sleep(3 * BEAT)
        silent, ended, alive = [], [], []
        for rank, old in enumerate(before):
            new = self._sign_of(rank)
            if new is None:
                silent.append(f"rank {rank} has not started")
                continue
            who = f"rank {rank} (process {new['process']} on {new['host']})"
            seen = f"{new['activity']} for {new['seconds']:.0f} s, {new['where']}, {new['collective']}"
            if new["ended"] and rank != self.rank:
                ended.append(f"{who} ended: {new['ended']}; last seen in {seen}")
            elif new == old and rank != self.rank:
                silent.append(f"{who} gives no sign of life; last seen in {seen}")
            else:
                alive.append(f"{who} is in {seen}")
        found = [*silent, *ended, *alive]
        rest = [f"and {len(found) - NAMED_RANKS} more"] if len(found) > NAMED_RANKS else []
        return "\n  ".join(["the ranks:", *found[:NAMED_RANKS], *rest])

    def _wait(self, store: dist.Store, key: str, rank: int) -> bytes:
        """The value of a key that `rank` sets."""
        pause, silent_since, beat = 0.002, time.monotonic(), None
        while not store.check([key]):
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
            if pause < 0.25:
                continue
            try:
                sign = self._sign_of(rank)
            except RuntimeError:  # the launcher is gone: the ranks are about to end, and this one with them
                continue
            if sign is not None and sign["beat"] != beat:
                silent_since, beat = time.monotonic(), sign["beat"]
            has_ended = sign is not None and sign["ended"] and not store.check([key])
            if has_ended or time.monotonic() - silent_since > self.silence:
                raise RankError(self.report())
        return bytes(store.get(key))

    def _sign_of(self, rank: int) -> dict[str, Any] | None:
        signs, key = self._signs, f"sign/{rank}"
        return json.loads(signs.get(key)) if signs is not None and signs.check([key]) else None

    def _give_signs(self) -> None:
        beat, beats_at_line, line, reported = 1, 0, "", None
        while not self._is_over.is_set():
            is_news = self._has_news.wait(BEAT)
            self._has_news.clear()
            last_line, line = line, self._where()
            beats_at_line = 0 if is_news or line != last_line else beats_at_line + 1
            if beats_at_line <= BEATS_UNTIL_STUCK:  # a name takes a tenth of a second: once, when it seems to wait
                collective = last_collective(by_name=beats_at_line == BEATS_UNTIL_STUCK)
            try:
                self._give_sign(beat, collective, line)
            except RuntimeError:  # the store is gone, with the process that kept it
                return
            beat += 1
            is_stuck = not self._is_alone and time.monotonic() - self._since > self.stall
            if is_stuck and self.rank < 2 and reported != self._since:
                reported = self._since
                threading.Thread(target=self._log_stall, daemon=True).start()  # signs of life go on meanwhile

    def _log_stall(self) -> None:
        try:
            logger.warning("%s takes more than %g s; %s", self._activity, self.stall, self.report())
        except RuntimeError:
            return

    def _give_sign(self, beat: int, collective: str, where: str, ended: str | None = None) -> None:
        sign = {
            "beat": beat,
            "process": os.getpid(),
            "host": socket.gethostname(),
            "activity": self._activity,
            "seconds": time.monotonic() - self._since,
            "where": where,
            "collective": collective,
            "ended": ended,
        }
        if self._signs is not None:
            self._signs.set(f"sign/{self.rank}", json.dumps(sign))

    def _where(self) -> str:
        frames = []
        frame: FrameType | None = sys._current_frames().get(self._main_thread)
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        return _place(frames)


def _place(frames: list[FrameType]) -> str:
    """The innermost line of this project among a thread's frames, the innermost first; this module's own count not."""
    for frame in frames:
        path = Path(frame.f_code.co_filename)
        if ROOT in path.parents and path != Path(__file__):
            return f"at {path.relative_to(ROOT)}:{frame.f_lineno} {frame.f_code.co_name}"
    return "at an unknown line"


def _store_of_main_process(rank: int, shared: dist.Store) -> dist.Store | None:
    """A store that the main process keeps, for whom it can be reached as the shared one is; None for other kinds."""
    tcp = shared
    while isinstance(tcp, dist.PrefixStore):
        tcp = tcp.underlying_store
    if not isinstance(tcp, dist.TCPStore):
        return None
    if rank == 0:
        # The address of this host on the way to the shared store, from where the others come too.
        family, _, _, _, address = socket.getaddrinfo(tcp.host, tcp.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect(address)
            host = way.getsockname()[0]
        own = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        shared.set("main process", json.dumps([host, own.port]))
        return own
    host, port = json.loads(shared.get("main process"))
    return dist.TCPStore(host, port, is_master=False)


SHARED_ERRORS: dict[str, type[Exception]] = {
    "ValueError": ValueError,
    "FloatingPointError": FloatingPointError,
    "OSError": OSError,
}
"""What one rank may raise for all: a user's mistake, a step that is not finite, a disk that is full."""


def is_of_collective(error: BaseException) -> bool:
    """Whether an error says that another rank did not take part in a collective, not that this rank failed."""
    signs = ("gloo", "nccl", "closed by peer", "reset by peer", "timed out")
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and any(sign in str(error).lower() for sign in signs)
    )


def last_collective(*, by_name: bool) -> str:
    """The last collective that this process issued, from torch's flight recorder where this build has one.

    Args:
        by_name: else, which is quick, only how many there were in each process group.
    """
    c10d = torch._C._distributed_c10d
    dumps = [getattr(c10d, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")]
    for dump in dumps:
        trace = json.loads(dump(includeCollectives=by_name)) if dump else {}
        if entries := trace.get("entries"):
            last = max(entries, key=lambda entry: entry["time_created_ns"])
            number, group = last["collective_seq_id"], last["process_group"][-1]
            return f"last collective {last['profiling_name']} number {number} of group {group}"
        if counts := trace.get("pg_status"):
            numbers = (f"{status['last_enqueued_collective']} in group {group}" for group, status in counts.items())
            return f"last collective: number {', '.join(numbers)}"
    return "no collective recorded"
