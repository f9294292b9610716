"""A process that is forked while its threads work: what a child gets is whole, and free. Without torch."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from tests.support.serving import in_process

BEGIN = """
import os, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads (Python 3.12)
from aotpack_runtime import forks

def in_fork(work):
    \"\"\"What a forked child says, within 20 seconds.\"\"\"
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        import signal
        signal.alarm(20)
        os.write(write, str(work()).encode())
        os._exit(0)
    os.close(write)
    said = os.read(read, 100).decode()
    os.waitpid(pid, 0)
    return said

def holding(lock, seconds, done=lambda: None):
    \"\"\"Another thread holds the lock by now.\"\"\"
    begun = threading.Event()
    def hold():
        with lock:
            begun.set()
            time.sleep(seconds)
            done()
    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    begun.wait()
    return thread
"""


def run(code: str) -> str:
    return in_process(BEGIN + code).strip()


def test_a_fork_waits_for_who_holds_a_lock_so_that_the_child_has_what_it_guards_whole() -> None:
    code = """
lock, value = forks.lock(forks.ENTRY), ["half"]
thread = holding(lock, 0.5, lambda: value.append("whole"))
print(in_fork(lambda: (lock.acquire(timeout=5), value[-1])), lock.acquire(timeout=5))
"""
    assert run(code) == "(True, 'whole') True"


def test_a_lock_that_is_held_for_good_holds_a_fork_up_no_longer_than_said_and_is_free_in_the_child() -> None:
    code = """
forks.WAIT_SECONDS = 0.3
lock = forks.lock(forks.LAST)
holding(lock, 60)
start = time.monotonic()
print(in_fork(lambda: lock.acquire(timeout=5)), time.monotonic() - start < 5, lock.acquire(timeout=0.1))
"""
    assert run(code) == "True True False"


def test_a_thread_that_forks_may_hold_locks_itself() -> None:
    code = """
lock = forks.lock(forks.ENTRY)
with lock:
    print(in_fork(lambda: lock.acquire(timeout=5)))
print(in_fork(lambda: lock.acquire(timeout=5)), holding(lock, 0) is not None)
"""
    assert run(code) == "True\nTrue True"


def test_locks_are_taken_from_the_outer_to_the_inner_so_that_a_fork_ends() -> None:
    """Threads take the outer one first, while others fork without a pause."""
    code = """
inner, outer = forks.lock(forks.LAST), forks.lock(forks.MISSES)
stop = []
def work():
    while not stop:
        with outer:
            time.sleep(0.0005)
            with inner:
                pass
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
start = time.monotonic()
found = {in_fork(lambda: (outer.acquire(timeout=5), inner.acquire(timeout=5))) for _ in range(50)}
stop.append(True)
for thread in threads:
    thread.join(5)
print(found, time.monotonic() - start < 20, any(thread.is_alive() for thread in threads))
"""
    assert run(code) == "{'(True, True)'} True False"


def test_what_is_to_be_done_in_a_child_is_done_there_alone_and_for_what_still_lives() -> None:
    code = """
done = []

class Room:
    def __init__(self, name):
        self.name = name
        forks.in_child(self.again)
    def again(self):
        done.append(self.name)

kept, gone = Room("kept"), Room("gone")
del gone
forks.before(lambda: done.append("before"))
print(in_fork(lambda: done), done)
"""
    assert run(code) == "['before', 'kept'] ['before']"


def test_what_is_gone_is_forgotten_and_python_ends_in_silence() -> None:
    program = """
        from aotpack_runtime import forks

        class Counted:
            def begin(self): pass

        before = len(forks._in_child)
        for _ in range(100):
            forks.in_child(Counted().begin)
        kept = Counted()
        forks.in_child(kept.begin)
        print(len(forks._in_child) - before)
        kept.itself = kept
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("1", "")
