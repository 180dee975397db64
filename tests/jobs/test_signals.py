"""Each case runs in a process of its own: a failing one would end pytest."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from runtime.stream.host_memory import HEAP_TUNABLE

ROOT = Path(__file__).resolve().parents[2]
PRELUDE = """
import hashlib, os, signal, sys, threading, time
from jobs.config.signals import StopFlag, exit_on_signals, block_signals

def send_later(number, *delays):
    def send():
        for delay in delays:
            time.sleep(delay)
            os.kill(os.getpid(), number)
    threading.Thread(target=send, daemon=True).start()

def one_long_call():
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", ROUNDS)  # one C call without the GIL, like a matrix product

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may have had them ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)
started = time.perf_counter()
hashlib.pbkdf2_hmac("sha256", b"x", b"y", 100_000)
ROUNDS = int(100_000 * 1.2 / (time.perf_counter() - started))
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    code = PRELUDE + textwrap.dedent(script)
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP"])
def test_flag_is_set_while_the_main_thread_sits_in_one_long_call(name: str) -> None:
    result = run(f"""
        with StopFlag() as stop:
            seen = []
            def poll():
                while not stop():
                    time.sleep(0.01)
                seen.append(time.monotonic())
            assert not stop.requested and stop.signal_name == ""
            threading.Thread(target=poll, daemon=True).start()
            send_later(signal.{name}, 0.1)
            one_long_call()
            ended = time.monotonic()
            time.sleep(0.05)
            assert stop.requested and stop.signal_name == "{name}", stop.signal_name
            assert seen and seen[0] < ended - 0.3, (seen, ended)
    """)
    assert result.returncode == 0, result.stderr


def test_second_signal_ends_the_process_at_once_with_75() -> None:
    result = run("""
        with StopFlag() as stop:
            send_later(signal.SIGTERM, 0.1, 0.7)
            one_long_call()
            one_long_call()
            print("too late")
    """)
    assert (result.returncode, result.stdout) == (75, ""), result.stderr
    first, second = [line for line in result.stderr.splitlines() if line]
    assert first == "stopping after the current pass"
    assert second.startswith("stopped at once; ")


def test_a_second_signal_ends_the_process_although_its_terminal_is_blocked() -> None:
    result = run("""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        try:
            while True:
                os.write(writer, bytes(4096))
        except BlockingIOError:
            os.set_blocking(writer, True)
        os.dup2(writer, 2)  # nobody reads
        with StopFlag() as stop:
            send_later(signal.SIGINT, 0.0, 0.7)
            time.sleep(10)
    """)
    assert result.returncode == 75


def test_another_signal_needs_no_pause_to_end_the_process() -> None:
    result = run("""
        with StopFlag() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
    """)
    assert result.returncode == 75, result.stderr


def test_one_request_sent_twice_in_a_burst_is_one_request() -> None:
    result = run("""
        with StopFlag() as stop:
            send_later(signal.SIGTERM, 0.0, 0.05)
            time.sleep(0.4)
            assert stop.requested
    """)
    assert result.returncode == 0, result.stderr


def test_threads_that_were_there_before_cannot_kill_the_process() -> None:
    result = run("""
        for _ in range(4):
            threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
        with StopFlag() as stop:
            for thread in threading.enumerate():
                signal.pthread_kill(thread.ident, signal.SIGTERM)
            time.sleep(0.2)
            assert stop.requested
        os._exit(0)
    """)
    assert result.returncode == 0, result.stderr


def test_forked_child_dies_of_its_own_signal_and_does_not_stop_the_parent() -> None:
    result = run("""
        with StopFlag() as stop:
            child = os.fork()
            if child == 0:
                time.sleep(30)
                os._exit(0)
            time.sleep(0.1)
            os.kill(child, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
            time.sleep(0.1)
            assert not stop.requested
    """)
    assert result.returncode == 0, result.stderr


def test_leaving_gives_back_handlers_and_descriptors_while_a_child_lives() -> None:
    result = run("""
        before, handler = len(os.listdir("/proc/self/fd")), signal.getsignal(signal.SIGINT)
        with StopFlag():
            child = os.fork()
            if child == 0:
                time.sleep(30)
                os._exit(0)
        os.kill(child, signal.SIGKILL)
        assert len(os.listdir("/proc/self/fd")) == before
        assert signal.getsignal(signal.SIGINT) is handler  # a background job's is to ignore it
        assert signal.set_wakeup_fd(-1) == -1
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    """)
    assert result.returncode == -signal.SIGTERM, result.stderr


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_what_a_shell_has_had_ignored_stays_ignored(name: str) -> None:
    result = run(f"""
        signal.signal(signal.{name}, signal.SIG_IGN)
        exit_on_signals()
        os.kill(os.getpid(), signal.{name})
        with StopFlag() as stop:
            os.kill(os.getpid(), signal.{name})
            time.sleep(0.1)
            assert not stop.requested
    """)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP"])
def test_a_signal_before_the_start_ends_the_process_with_75(name: str) -> None:
    result = run(f"""
        exit_on_signals()
        os.kill(os.getpid(), signal.{name})
        print("too late")
    """)
    assert (result.returncode, result.stdout) == (75, ""), result.stderr
    assert result.stderr.startswith("interrupted before the run started")


def test_a_signal_while_the_process_is_replaced_waits_for_its_successor() -> None:
    result = run("""
        block_signals()
        os.kill(os.getpid(), signal.SIGTERM)
        code = "from jobs.config.signals import *; print('there', flush=True); exit_on_signals(); print('too late')"
        os.execv(sys.executable, [sys.executable, "-c", code])
    """)
    assert (result.returncode, result.stdout) == (75, "there\n"), result.stderr


def test_a_flag_takes_over_from_the_start() -> None:
    result = run("""
        exit_on_signals()
        with StopFlag() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            assert stop.requested
    """)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("is_settled", [False, True])
def test_a_job_that_is_stopped_while_it_imports_ends_with_75(tmp_path: Path, is_settled: bool) -> None:
    command = [sys.executable, "-m", "jobs.generate", f"output_root={tmp_path}"]
    environment = {**os.environ, "GLIBC_TUNABLES": ""}
    job = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    while not (hears_sigterm(job.pid) and (not is_settled or is_second(job.pid))):
        assert job.poll() is None
        time.sleep(0.001)
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 75, errors
    assert "Traceback" not in errors


def hears_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> signal.SIGTERM - 1 & 1)


def is_second(pid: int) -> bool:
    """Whether the process has been replaced by itself."""
    return HEAP_TUNABLE.encode() in Path(f"/proc/{pid}/environ").read_bytes()
