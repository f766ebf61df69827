"""What a signal does before, in and beside training."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from training import stopping
from training.stopping import Stop

CODES = [(signal.SIGTERM, 0), (signal.SIGINT, 130)]


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # the handler runs between two instructions


@pytest.mark.parametrize("number, code", CODES)
def test_a_signal_before_training_ends_the_process_at_once(number: signal.Signals, code: int) -> None:
    with pytest.raises(SystemExit) as ended, Stop():
        send(number)
    assert ended.value.code == code


@pytest.mark.parametrize("number, code", CODES)
def test_a_signal_in_training_is_noted_and_gives_up_what_is_optional(number: signal.Signals, code: int) -> None:
    handler = signal.getsignal(number)

    def validate() -> str:
        send(number)
        pytest.fail("was not interrupted")

    with Stop() as stop:
        stop.training = True
        assert stop.interruptible(lambda: "done", "given up") == "done"
        assert stop.interruptible(validate, "given up") == "given up" and stop.code == code
        assert stop.interruptible(validate, "not begun") == "not begun"
        send(number)  # launchers may repeat it
        assert stop.code == code
    assert signal.getsignal(number) == handler


def test_the_first_of_several_signals_gives_the_code_and_an_impatient_one_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stopping, "IMPATIENCE", 0.0)
    with pytest.raises(SystemExit) as ended, Stop() as stop:
        stop.training = True
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        assert stop.code == 0
        send(signal.SIGINT)
    assert ended.value.code == 0


ORPHAN = """
    import os, sys, time
    from training.stopping import Stop

    if os.fork():
        time.sleep(0.5)
        os._exit(0)  # the launcher
    with Stop(os.getppid(), patience=1.0) as stop:
        stop.training = True
        while stop.code is None or sys.argv[1] == "hangs":
            time.sleep(0.01)
        print("asked to end with", stop.code, flush=True)
"""


@pytest.mark.parametrize("how, said", [("", "asked to end with 0"), ("hangs", "the launcher is gone")])
def test_a_process_whose_launcher_died_is_asked_to_end_and_ended_if_it_hangs(how: str, said: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(ORPHAN), how]
    done = subprocess.run(command, cwd=Path(stopping.__file__).parents[1], capture_output=True, text=True, timeout=60)
    assert said in done.stdout + done.stderr


WORKERS = """
    import os, signal, time
    from torch.utils.data import DataLoader, Dataset
    from training.stopping import ignore_signals_but_from_parent

    class Slow(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            if index == 1:
                for number in (signal.SIGTERM, signal.SIGINT):
                    subprocess = os.fork()
                    if subprocess == 0:  # a signal from somebody else, as from a launcher to a process group
                        os.kill(os.getppid(), number)
                        os._exit(0)
                    os.waitpid(subprocess, 0)
                    time.sleep(0.1)
            return index

    print([int(x) for x in DataLoader(Slow(), num_workers=1, worker_init_fn=ignore_signals_but_from_parent)])
    iterator = iter(DataLoader(Slow(), num_workers=1, worker_init_fn=ignore_signals_but_from_parent))
    next(iterator)
    raise SystemExit("with a worker that waits")
"""


def test_a_loader_s_workers_outlive_a_signal_to_their_group_but_not_their_rank() -> None:
    command = [sys.executable, "-c", textwrap.dedent(WORKERS)]
    done = subprocess.run(command, cwd=Path(stopping.__file__).parents[1], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[0, 1, 2, 3]", done.stderr
    assert done.stderr.strip().endswith("with a worker that waits")
