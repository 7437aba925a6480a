"""Random power cuts and kills of a file backend: ``python -m tests.kvcache.storage.crashes``.

A trial runs three processes in turn on one directory of a simulated disk. Each begins with a check
of what the earlier ones were promised, and ends at a random moment: in the middle of a write,
between any two calls, or during recovery.
"""

from __future__ import annotations

import argparse
import logging
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256

from .conformance import keys_of
from .crash_disk import CrashDisk, Faults, PowerCut
from .planted import BUGS, REAL, Subject, load

NUM_KEYS = 16
LIVES = 3
OPERATIONS = 10
MOMENTS = 70
NO_FAULTS = Faults()
SOME_FAULTS = Faults(short_write=4, no_space=60, sync_fails=12)
ALL_FAULTS = Faults(short_write=4, no_space=60, sync_fails=12, unlink_fails=8)


@cache
def key_of(number: int) -> bytes:
    digest = sha256(b"%d" % number).digest()
    return bytes([number % 2]) + digest[1:]  # uses two subdirectories


@cache
def payload_of(number: int) -> bytes:
    size = 20 + sha256(b"size %d" % number).digest()[0]
    return (sha256(b"payload %d" % number).digest() * 9)[:size]


@dataclass
class Promises:
    """What the backend has promised, as the trial records it."""

    attempted: set[int] = field(default_factory=set)  # a store started
    failed: set[int] = field(default_factory=set)  # a store failed
    stored: set[int] = field(default_factory=set)  # stored, and not removed since
    deleted: set[int] = field(default_factory=set)  # deleted, and not stored since


class Trial:
    """Three processes on one directory; `run` raises AssertionError at the first broken promise."""

    def __init__(self, seed: int, subject: Subject = REAL) -> None:
        self.below = random.Random(seed).randrange
        self.subject = subject
        self.durable = self.below(2) == 0
        self.tight = self.below(4) == 0  # small budget: it evicts
        self.faults = (NO_FAULTS, NO_FAULTS, SOME_FAULTS, ALL_FAULTS)[self.below(4)]
        self.faulty = self.faults is not NO_FAULTS
        self.disk = CrashDisk(self.below)
        self.promises = Promises()
        self.backend = None  # the current process's backend, after its recovery
        self.crashes = 0

    def run(self) -> int:
        """Return the number of crashes."""
        for _ in range(LIVES):
            power_cut = self.below(4) > 0
            try:
                self.live()
            except PowerCut:
                self.crashes += 1
                self.allow_evicted(set(keys_of(self.backend)) if self.backend else set())
            self.disk.restart(power_cut=power_cut, cut_at=1 + self.below(MOMENTS))
            if power_cut and not self.durable:
                self.promises.stored.clear()
                self.promises.deleted.clear()
        self.disk.cut_at = None
        self.recover()
        return self.crashes

    def live(self) -> None:
        self.backend = None
        self.backend, checksummed = backend, _ = self.recover()
        self.disk.faults = self.faults
        for _ in range(OPERATIONS):
            number = self.below(NUM_KEYS)
            match self.below(8):
                case 0 | 1:
                    self.delete(checksummed, number)
                case 2:
                    self.load(checksummed, number)
                case _:
                    self.store(checksummed, number)
            here = set(keys_of(backend))
            self.allow_evicted(here)
            lost = [n for n in self.promises.stored if key_of(n) not in here]
            assert not lost, f"{lost} went without being deleted"
            backend.check()
        self.nothing_is_left_over(backend)

    def recover(self):
        self.disk.faults = NO_FAULTS
        backend = self.subject.files.FileBackend(
            "/cache",
            max_bytes=900 if self.tight else 1_000_000,
            sync="data" if self.durable else "none",
            files=self.disk,
            clock_ns=lambda: 0,
        )
        backend.check()
        self.nothing_is_left_over(backend)
        checksummed = self.subject.checksummed.ChecksummedBackend(backend)
        here = {n for n in range(NUM_KEYS) if backend.contains([key_of(n)])[0]}
        back = here & self.promises.deleted
        assert not back, f"{back} were deleted and are back"
        assert here <= self.promises.attempted, "a key that nobody stored"
        self.allow_evicted(set(keys_of(backend)))
        lost = self.promises.stored - here
        assert not lost, f"{lost} were stored and are lost"
        for number in here:
            self.load(checksummed, number)
        return backend, checksummed

    def allow_evicted(self, here: set[bytes]) -> None:
        """With a small budget, a value may be evicted without notice."""
        if self.tight:
            self.promises.stored = {n for n in self.promises.stored if key_of(n) in here}

    def nothing_is_left_over(self, backend) -> None:
        """Every file is a known value; an unknown one would take space forever."""
        names = {
            name
            for bucket in ("00", "01")
            if bucket in self.disk._directory("/cache").seen
            for name, _, _ in self.disk.scan(f"/cache/{bucket}")
        }
        known = set(map(bytes.hex, keys_of(backend)))
        assert known <= names, "a value without a file"
        left = names - known
        if self.disk.faults.unlink_fails:  # files may remain until the next start
            failed = {key_of(number).hex() for number in self.promises.failed}
            left = {name for name in left - failed if not name.startswith(".tmp-")}
        assert not left, "files that are no values"

    def store(self, checksummed, number: int) -> None:
        self.promises.attempted.add(number)
        self.promises.deleted.discard(number)
        status, _ = checksummed.store(key_of(number), [memoryview(payload_of(number))])
        if status.name in ("STORED", "EXISTS"):
            self.promises.stored.add(number)
        else:
            assert status.name == "FAILED", status
            self.promises.failed.add(number)
            assert self.faulty or self.tight, "failed without a fault"
            assert number not in self.promises.stored, "it existed"

    def load(self, checksummed, number: int) -> None:
        into = bytearray(len(payload_of(number)))
        status, _ = checksummed.load(key_of(number), [memoryview(into)])
        if status.name == "LOADED":
            assert into == payload_of(number), f"{number} has other bytes than were stored"
            if self.durable:
                self.promises.stored.add(number)
        else:
            assert number not in self.promises.stored, f"{number} was stored and is {status.name}"
            assert status.name in ("MISSING", "CORRUPT"), status
            assert status.name != "CORRUPT" or not self.durable, f"{number} is seen and torn"

    def delete(self, checksummed, number: int) -> None:
        was_stored = number in self.promises.stored
        self.promises.stored.discard(number)
        status, _ = checksummed.delete(key_of(number))
        if status.name in ("DELETED", "MISSING"):
            self.promises.deleted.add(number)
            assert status.name == "DELETED" or not was_stored, "it was stored"
        else:
            assert self.faulty, "failed without a fault"


def hunt(subject: Subject, seeds: Iterator[int], crashes: int) -> tuple[int, int, str]:
    """Run trials up to a number of crashes; return trials, crashes and the first broken promise."""
    logging.disable()  # failures are expected
    try:
        return _hunt(subject, seeds, crashes)
    finally:
        logging.disable(logging.NOTSET)


def _hunt(subject: Subject, seeds: Iterator[int], crashes: int) -> tuple[int, int, str]:
    done = trials = 0
    for seed in seeds:
        if done >= crashes:
            break
        trials += 1
        trial = Trial(seed, subject)
        try:
            done += trial.run()
        except AssertionError as broken:
            return trials, done + trial.crashes, f"seed {seed}: {broken}"
    return trials, done, ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Crash the file backend on a simulated disk.")
    parser.add_argument("--crashes", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    parser.add_argument("--no-bugs", action="store_true", help="do not hunt the planted bugs")
    arguments = parser.parse_args()
    start = time.process_time()
    trials, crashes, broken = hunt(REAL, iter(range(arguments.seed, 2**62)), arguments.crashes)
    rate = crashes / (time.process_time() - start)
    print(f"{trials:,} trials, {crashes:,} crashes, {rate:,.0f} per CPU second: {broken or 'none'}")
    missed = 0
    for bug in () if arguments.no_bugs else BUGS:
        trials, _, found = hunt(load(bug), iter(range(arguments.seed, 2**62)), 20_000)
        print(f"{bug.name}: {f'{trials:,} trials, {found}' if found else 'NOT FOUND'}")
        missed += not found
    return bool(broken or missed)


if __name__ == "__main__":
    raise SystemExit(main())
