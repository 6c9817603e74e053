"""Hosts meet by a store in which nothing is unpickled that they have not signed."""

import os
import pickle
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousStateError

from gpipe.launch.rendezvous import SECRET, SignedBackend, signed
from gpipe.launch.store import LOOPBACK, serve_store
from tests.support.listeners import listeners_of
from tests.test_secrets import Trap

JOB_SECRET = "known to the hosts of this job"


def test_hosts_with_the_same_secret_share_a_state() -> None:
    store = serve_store(LOOPBACK)
    first, second = (SignedBackend(store, "job", JOB_SECRET) for _ in range(2))
    assert first.get_state() is None
    written = first.set_state(b"one")
    assert written is not None and (written[0], written[2]) == (b"one", True)
    assert second.set_state(b"two") == (b"one", written[1], False)  # somebody was faster
    replaced = second.set_state(b"two", written[1])
    assert replaced is not None and replaced[2]
    assert first.get_state() == (b"two", replaced[1])


@pytest.mark.parametrize(("run_id", "secret"), [("job", "a guess of somebody else"), ("another", JOB_SECRET)])
def test_a_state_of_another_secret_or_job_is_refused(run_id: str, secret: str) -> None:
    store = serve_store(LOOPBACK)
    found = SignedBackend(store, run_id, secret).set_state(b"one")
    assert found is not None
    store.set("torch.rendezvous.job", found[1])
    with pytest.raises(RendezvousStateError, match="a state that is not signed with this host's GPIPE_JOB_SECRET"):
        SignedBackend(store, "job", JOB_SECRET).get_state()


def test_a_pickle_that_somebody_else_sends_is_not_opened(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SECRET, JOB_SECRET)
    meeting = signed()(RendezvousParameters("gpipe", f"{LOOPBACK}:0", "job", 1, 1, LOOPBACK, is_host="1"))
    SignedBackend(meeting._store, "job", "a guess of somebody else").set_state(pickle.dumps(Trap()))
    with pytest.raises(RendezvousStateError):
        meeting.next_rendezvous()
    assert not (tmp_path / "sprung").exists()


def test_a_rendezvous_listens_where_it_is_told_to(monkeypatch) -> None:
    monkeypatch.setenv(SECRET, JOB_SECRET)
    before = {*listeners_of(os.getpid())}
    meeting = signed()(RendezvousParameters("gpipe", f"{LOOPBACK}:0", "job", 1, 1, LOOPBACK, is_host="1"))
    meeting.next_rendezvous()
    opened = {*listeners_of(os.getpid())} - before
    assert len(opened) == 2 and {str(address) for address, _ in opened} == {LOOPBACK}  # the hosts', the processes'


def test_a_host_that_is_told_to_serve_joins_no_other_store(monkeypatch) -> None:
    monkeypatch.setenv(SECRET, JOB_SECRET)
    other = serve_store(LOOPBACK)
    with pytest.raises(OSError, match="Address already in use"):
        signed()(RendezvousParameters("gpipe", f"{LOOPBACK}:{other.port}", "job", 1, 1, LOOPBACK, is_host="1"))


def test_no_host_meets_another_without_a_secret(monkeypatch) -> None:
    monkeypatch.setenv(SECRET, "short")
    with pytest.raises(ValueError, match="GPIPE_JOB_SECRET has 5 characters, expected 16 or more"):
        signed()(RendezvousParameters("gpipe", f"{LOOPBACK}:0", "job", 1, 1, LOOPBACK, is_host="1"))
