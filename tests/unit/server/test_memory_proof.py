"""How a trainer proves to be on the server's machine."""

from pathlib import Path

import pytest

from pserver.errors import InvalidRequest, SharedMemoryUnavailable
from pserver.server.memory_proof import NONCE_BYTES, MemoryProof
from pserver.wire import shm
from pserver.wire.shm import map_segment


def test_whoever_reads_the_nonce_has_proved_to_be_here() -> None:
    proof = MemoryProof(enabled=True)
    nonce = bytes(map_segment(proof.segment(), writable=False))
    assert len(nonce) == NONCE_BYTES
    proof.check(nonce)
    proof.close()


def test_the_segment_is_made_when_it_is_first_asked_for_and_once(directory: Path) -> None:
    proof = MemoryProof(enabled=True)
    assert list(directory.iterdir()) == []
    assert proof.segment() == proof.segment()
    assert [path.name for path in directory.iterdir()] == [proof.segment()]
    proof.close()
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("nonce", [b"", bytes(NONCE_BYTES), b"x" * NONCE_BYTES, bytes(100_000)], ids=len)
@pytest.mark.parametrize("asked", [True, False])
def test_whoever_has_not_read_it_is_refused(nonce: bytes, asked: bool) -> None:
    """Nothing is a nonce before there is one."""
    proof = MemoryProof(enabled=True)
    if asked:
        proof.segment()
    with pytest.raises(InvalidRequest, match="ask FindMemory for its name first"):
        proof.check(nonce)
    proof.close()


def test_nonces_of_two_servers_differ() -> None:
    proofs = [MemoryProof(enabled=True) for _ in range(2)]
    nonces = [bytes(map_segment(each.segment(), writable=False)) for each in proofs]
    assert nonces[0] != nonces[1]
    with pytest.raises(InvalidRequest):
        proofs[0].check(nonces[1])
    for each in proofs:
        each.close()


def test_a_server_that_is_not_to_share_memory_says_so(directory: Path) -> None:
    proof = MemoryProof(enabled=False)
    with pytest.raises(SharedMemoryUnavailable, match="started with --no-shared-memory"):
        proof.segment()
    with pytest.raises(InvalidRequest):
        proof.check(b"")
    assert list(directory.iterdir()) == []
    proof.close()


def test_a_server_that_cannot_share_memory_says_why_and_may_later(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = MemoryProof(enabled=True)
    with monkeypatch.context() as patch:
        patch.setattr(shm, "DIRECTORY", Path("/no/such/directory"))
        with pytest.raises(SharedMemoryUnavailable, match="/no/such/directory is missing"):
            proof.segment()
    proof.check(bytes(map_segment(proof.segment(), writable=False)))
    proof.close()
