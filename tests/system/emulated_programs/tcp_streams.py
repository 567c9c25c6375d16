"""Sends MEGABYTES over each TCP stream in STREAMS ("0>2 1>3", from rank to rank); receivers print what they measured.

Needs nothing but Python. A rank either sends or receives. Times and bytes count from the first byte received, so that
starting does not matter.
"""

import json
import os
import socket
import sys
import threading
import time

PORT = 5000
RANK = int(os.environ["RANK"])
DEVICES_PER_SERVER = int(os.environ["LOCAL_WORLD_SIZE"])


def address(rank: int) -> str:
    server, device = divmod(rank, DEVICES_PER_SERVER)
    return f"10.0.{server + 1}.{device + 1}"


def connect(to: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection((address(to), PORT))
        except OSError:
            time.sleep(0.02)


def send(to: int, megabytes: float) -> None:
    namespace = os.readlink("/proc/self/ns/net").encode()
    with connect(to) as stream:
        stream.sendall(namespace.ljust(64))
        stream.sendall(bytes(round(megabytes * 1e6)))


def receive(server: socket.socket) -> None:
    stream, _ = server.accept()
    with stream:
        peer = stream.recv(64, socket.MSG_WAITALL).decode().strip()
        stream.recv(1)
        started_s, received = time.monotonic(), 0
        while data := stream.recv(1 << 20):
            received += len(data)
        ended_s = time.monotonic()
    result = {"started_s": started_s, "ended_s": ended_s, "bytes": received}
    result["namespaces"] = [os.readlink("/proc/self/ns/net"), peer]
    sys.stdout.write(json.dumps(result) + "\n")  # in one piece: the ranks share the output


pairs = [tuple(map(int, pair.split(">"))) for pair in os.environ["STREAMS"].split()]
targets = [target for source, target in pairs if source == RANK]
incoming = [source for source, target in pairs if target == RANK]
if incoming:
    with socket.create_server((address(RANK), PORT)) as server:
        receivers = [threading.Thread(target=receive, args=(server,)) for _ in incoming]
        for receiver in receivers:
            receiver.start()
        for receiver in receivers:
            receiver.join()
senders = [threading.Thread(target=send, args=(target, float(os.environ["MEGABYTES"]))) for target in targets]
for sender in senders:
    sender.start()
