"""Runs a command once per rank on an emulated commodity cluster. See docs/emulated_cluster.md."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.oases.environment import require  # noqa: E402

require()

from megatron.oases.command_line import OneLineParser, split_at_double_dash  # noqa: E402
from megatron.oases.emulation.cluster import Cluster  # noqa: E402
from megatron.oases.emulation.run import run_emulated  # noqa: E402
from megatron.oases.errors import UsageError, exit_on_usage_error  # noqa: E402


def parse_arguments(argv: list[str]) -> tuple[Cluster, list[str], bool]:
    parser = OneLineParser(
        description="Run COMMAND once per rank, as torchrun would, on servers whose links the kernel shapes. "
        "Needs root and iproute2.",
        usage="emulate_cluster.py --servers N --nic-gbps G [options] -- COMMAND",
    )
    parser.add_argument("--servers", type=int, required=True, help="number of servers")
    parser.add_argument("--devices-per-server", type=int, default=1, help="devices (ranks) a server (default 1)")
    parser.add_argument(
        "--nic-gbps", type=float, required=True, help="each server's NIC, shared by its devices, Gbit/s each way"
    )
    parser.add_argument(
        "--intra-gbps", type=float, help="between devices of one server, Gbit/s each way (default: not limited)"
    )
    parser.add_argument(
        "--device-speed",
        type=float,
        help="cores each rank's computing may use, such as 0.5; gloo's threads are not counted (default: not limited)",
    )
    parser.add_argument("--prefix-output", action="store_true", help="put [rank N] before every line of output")
    own, command = split_at_double_dash(argv)
    arguments, left_over = parser.parse_known_args(own)
    if "--" not in argv and left_over and not left_over[0].startswith("-"):
        raise UsageError(f"put `--` before the command: -- {left_over[0]} ...")
    if left_over:
        parser.error(f"unrecognized arguments: {' '.join(left_over)}")
    if not command:
        raise UsageError("no command: put `-- COMMAND` after the flags")
    cluster = Cluster(
        servers=arguments.servers,
        devices_per_server=arguments.devices_per_server,
        nic_gbps=arguments.nic_gbps,
        intra_gbps=arguments.intra_gbps,
        device_speed=arguments.device_speed,
    )
    return cluster, command, arguments.prefix_output


def main() -> int:
    with exit_on_usage_error():
        cluster, command, prefix_output = parse_arguments(sys.argv[1:])
        return run_emulated(cluster, command, prefix_output=prefix_output)


if __name__ == "__main__":
    sys.exit(main())
