import asyncio
import time

import pytest
import zmq
from voltapile.gateway.wire import BATCH, Wire


class Peer:
    """A DEALER that blocks; used from a thread."""

    def __init__(self, endpoint, name=b"a"):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.set(zmq.IDENTITY, name)
        self.socket.set(zmq.RCVTIMEO, 5000)
        self.socket.connect(endpoint)

    async def receive(self):
        return await asyncio.to_thread(self.socket.recv_multipart)

    def close(self):
        self.context.destroy(linger=0)


@pytest.fixture
def endpoint(tmp_path):
    return f"ipc://{tmp_path}/wire"


@pytest.fixture
async def pair(endpoint):
    """(wire, peer, what the wire took)."""
    taken = asyncio.Queue()
    wire = Wire(endpoint, lambda name, frames: taken.put_nowait((name, frames)))
    peer = Peer(endpoint)
    yield wire, peer, taken
    peer.close()
    wire.close()


async def take(taken):
    return await asyncio.wait_for(taken.get(), 5)


async def test_there_and_back(pair):
    wire, peer, taken = pair
    for i in range(20):
        peer.socket.send_multipart([b"hello", b"%d" % i])
        assert await take(taken) == ("a", [b"hello", b"%d" % i])
        wire.send("a", [b"x", memoryview(b"yz")])
        assert await peer.receive() == [b"x", b"yz"]


async def test_a_burst_arrives_whole_and_in_order(pair):
    _, peer, taken = pair
    count = 5 * BATCH + 3
    for i in range(count):
        peer.socket.send(b"%d" % i)
    assert [(await take(taken))[1] for _ in range(count)] == [[b"%d" % i] for i in range(count)]


async def test_what_comes_while_much_is_sent_is_seen(pair):
    """A send may swallow the descriptor's only sign that something has come."""
    wire, peer, taken = pair
    peer.socket.send(b"first")
    await take(taken)
    for i in range(50):
        peer.socket.send(b"%d" % i)
        time.sleep(0.002)  # it lies in the queue now, and the loop has not looked
        wire.send("a", [b"x"])
        assert (await take(taken))[1] == [b"%d" % i]


async def test_a_message_to_nobody_is_dropped(pair):
    wire, _, _ = pair
    wire.send("nobody", [b"x"])


async def test_an_address_that_cannot_be(tmp_path):
    with pytest.raises(OSError, match="cannot listen"):
        Wire(f"ipc://{tmp_path}/no/such/folder/x", lambda name, frames: None)
