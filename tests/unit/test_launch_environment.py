import socket

import pytest

from megatron.oases.launch import complete_environment


def test_a_plain_python_is_a_world_of_one():
    environment: dict[str, str] = {}
    complete_environment(environment)
    port = int(environment.pop("MASTER_PORT"))
    assert 0 < port < 65536
    assert environment == {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }


def _rank(**changed: str) -> dict[str, str]:
    environment = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", **changed}
    complete_environment(environment)
    return environment


@pytest.mark.parametrize("master", ["localhost", "127.0.0.1", "127.0.1.1", socket.gethostname()])
def test_a_run_on_one_machine_uses_its_loopback(master):
    environment = _rank(MASTER_ADDR=master)
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert environment["MASTER_ADDR"] == "127.0.0.1"


def test_what_the_launcher_chose_stays():
    assert _rank(GLOO_SOCKET_IFNAME="eth7")["GLOO_SOCKET_IFNAME"] == "eth7"
    assert _rank(MASTER_PORT="1234")["MASTER_PORT"] == "1234"


@pytest.mark.parametrize("changed", [{"WORLD_SIZE": "4"}, {"MASTER_ADDR": "10.1.0.1"}])
def test_a_run_on_several_machines_or_addresses_is_left_alone(changed):
    environment = _rank(**changed)
    assert "GLOO_SOCKET_IFNAME" not in environment
    assert environment["MASTER_ADDR"] == changed.get("MASTER_ADDR", "localhost")
