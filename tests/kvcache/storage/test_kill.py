"""Kill a real process during its writes: every acknowledged value is still there."""

import random
import subprocess
import sys
from pathlib import Path

from radixkv.kvcache.storage import ChecksummedBackend, FileBackend, Status, StorageWorkers

from .crashes import key_of

KILLS = 10
VALUE_BYTES = 100_000

# Stores one value after the other and prints each, until it is killed; the budget fits all.
CHILD = """
import sys
from hashlib import sha256
from radixkv.kvcache.storage import FileBackend, ChecksummedBackend
checksummed = ChecksummedBackend(FileBackend(sys.argv[1], max_bytes=10**9))
for number in range(int(sys.argv[2]), int(sys.argv[2]) + 500):
    digest = sha256(b"%d" % number).digest()
    status, _ = checksummed.store(bytes([number % 2]) + digest[1:], [memoryview(digest * 3125)])
    print(status.name, number, flush=True)
"""


def test_values_acknowledged_before_a_kill_are_there(tmp_path: Path) -> None:
    rng = random.Random(0)
    directory = tmp_path / "cache"
    begin = end = 0
    for _ in range(KILLS):
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", CHILD, str(directory), str(begin)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        for _ in range(rng.randrange(1, 60)):
            said, number = child.stdout.readline().split()
            assert said == "STORED"
            end = int(number) + 1
        child.kill()
        for line in child.stdout:  # the rest of its output
            if line.endswith("\n"):
                end = int(line.split()[1]) + 1
        child.stdout.close()
        child.wait()
        begin = check(directory, begin, end)


def check(directory: Path, begin: int, end: int) -> int:
    """Load the values stored since begin; return the first missing number."""
    backend = FileBackend(directory, max_bytes=10**9)  # the lock ended with the process
    checksummed = ChecksummedBackend(backend)
    into = memoryview(bytearray(VALUE_BYTES))
    for number in range(begin, end + 2):
        status, _ = checksummed.load(key_of(number), [into])
        if number < end:
            assert status is Status.LOADED, (number, status)
        else:  # it may exist, but must be whole
            assert status in (Status.LOADED, Status.MISSING)
    backend.check()
    first_missing = next(n for n in range(end, end + 3) if not backend.contains([key_of(n)])[0])
    backend.close()
    return first_missing


def test_files_under_threads(tmp_path: Path) -> None:
    """Store more than the budget on all threads: no value is corrupt."""
    backend = FileBackend(tmp_path / "cache", max_bytes=50_000)
    storage = StorageWorkers(backend, max_bytes_in_flight=10**7)
    rng = random.Random(0)
    keys = [key_of(number) for number in range(40)]
    for _ in range(50):
        some = rng.sample(keys, 20)
        storage.store(some[:10], [[key * 50] for key in some[:10]], timeout_s=1_000)
        storage.load(some[10:], [[bytearray(1_600)] for _ in some[10:]], timeout_s=1_000)
        storage.delete(some[:2], timeout_s=1_000)
    last = storage.store(keys[:1], [[keys[0] * 50]], timeout_s=1_000)
    with storage._lock:
        storage._reported.wait_for(lambda: storage._table.num_open == 0)
    assert storage.fenced(last)
    assert storage.close(timeout_s=60.0)
    stats = storage.stats()
    assert stats.blocks.keys() <= {
        Status.STORED,
        Status.EXISTS,
        Status.LOADED,
        Status.DELETED,
        Status.MISSING,
    }, stats
    backend.check()
    assert stats.backend["evicted_values"] > 0
