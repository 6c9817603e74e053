"""Gloo listens where the first host is reached."""

import pytest

from gpipe.launch import network


def test_the_interface_of_an_address_is_found() -> None:
    assert network._interface_of("127.0.0.1") == "lo"
    assert network._interface_of("192.0.2.1") is None  # kept for documentation: nobody has it
    assert network._interface_of(None) is None


def test_an_address_that_only_this_host_knows_leads_nowhere() -> None:
    assert network._address_towards("127.0.0.1") is None
    assert network._address_towards("localhost") is None


@pytest.mark.parametrize(
    "variables",
    [
        {"GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "192.0.2.1"},
        {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
        {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1", "GLOO_SOCKET_IFNAME": "mine"},
    ],
    ids=["one host", "nothing known", "said by the user"],
)
def test_gloo_is_left_alone(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    network.choose_interface()
    assert network.os.environ.get("GLOO_SOCKET_IFNAME") == variables.get("GLOO_SOCKET_IFNAME")
