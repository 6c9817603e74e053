"""Gloo listens where the first host is reached."""

from collections.abc import Callable

import pytest

from gpipe.launch import rendezvous


def test_the_interface_of_an_address_is_found() -> None:
    assert rendezvous._find_interface("127.0.0.1") == "lo"
    assert rendezvous._find_interface("192.0.2.1") is None  # kept for documentation: nobody has it
    assert rendezvous._find_interface(None) is None


def test_an_address_that_only_this_host_knows_leads_nowhere() -> None:
    assert rendezvous._find_address_towards("127.0.0.1") is None
    assert rendezvous._find_address_towards("localhost") is None


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set variables in place of torchrun; what is set from them is taken back."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return lambda **values: [monkeypatch.setenv(name, value) for name, value in values.items()]


@pytest.mark.parametrize("gloo", ["eth0", None])
def test_processes_of_one_host_talk_by_the_loopback_interface(gloo: str | None, variables: Callable[..., None]) -> None:
    said = {} if gloo is None else {"GLOO_SOCKET_IFNAME": gloo}
    variables(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="192.0.2.1", **said)
    rendezvous.choose_interface()
    assert (rendezvous.os.environ["GLOO_SOCKET_IFNAME"], rendezvous.os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")


@pytest.mark.parametrize(
    "said",
    [
        {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"},
        {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "192.0.2.1", "GLOO_SOCKET_IFNAME": "mine"},
    ],
    ids=["nothing known", "said by the user"],
)
def test_gloo_is_left_alone(said: dict[str, str], variables: Callable[..., None]) -> None:
    variables(WORLD_SIZE="2", **said)
    rendezvous.choose_interface()
    assert rendezvous.os.environ.get("GLOO_SOCKET_IFNAME") == said.get("GLOO_SOCKET_IFNAME")
