import asyncio
import contextlib
import socket

import pytest
import zmq
from voltapile.gateway.wire import Wire


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
    wire.open()
    peer = Peer(endpoint)
    yield wire, peer, taken
    peer.close()
    wire.close()


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
    count = 20_000

    def burst():
        for i in range(count):
            peer.socket.send(b"%d" % i)

    await asyncio.to_thread(burst)
    assert [(await take(taken))[1] for _ in range(count)] == [[b"%d" % i] for i in range(count)]


@pytest.mark.parametrize("size", [0, 1, 255, 256, 70_000, 3_000_000])
async def test_frames_of_any_size(pair, size):
    wire, peer, taken = pair
    frames = [b"first", bytes(size), b"", b"last"]
    peer.socket.send_multipart(frames)
    assert await take(taken) == ("a", frames)
    wire.send("a", frames)
    assert await peer.receive() == frames


async def test_a_new_worker_takes_the_name_of_a_dead_one(pair, endpoint):
    wire, peer, taken = pair
    peer.socket.send(b"old")
    await take(taken)
    newer = Peer(endpoint)
    newer.socket.send(b"new")
    assert await take(taken) == ("a", [b"new"])
    wire.send("a", [b"x"])
    assert await newer.receive() == [b"x"]
    newer.close()


async def test_the_last_word_arrives_before_the_end(endpoint):
    taken = asyncio.Queue()
    wire = Wire(endpoint, lambda name, frames: taken.put_nowait(frames))
    wire.open()
    peer = Peer(endpoint)
    peer.socket.send(b"hello")
    await take(taken)
    wire.send("a", [bytes(1 << 20)])
    wire.send("a", [b"stop"])
    wire.close()
    assert [await peer.receive() for _ in range(2)] == [[bytes(1 << 20)], [b"stop"]]
    peer.close()


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 200])
async def test_who_is_no_worker_harms_nobody(pair, endpoint, junk):
    _, peer, taken = pair
    reader, writer = await asyncio.open_unix_connection(endpoint.removeprefix("ipc://"))
    writer.write(junk)
    with contextlib.suppress(ConnectionError, TimeoutError):
        await asyncio.wait_for(reader.read(), 0.3)
    writer.close()
    peer.socket.send(b"still here")
    assert await take(taken) == ("a", [b"still here"])


async def test_over_tcp(free_port):
    endpoint = f"tcp://127.0.0.1:{free_port}"
    taken = asyncio.Queue()
    wire = Wire(endpoint, lambda name, frames: taken.put_nowait(frames))
    wire.open()
    peer = Peer(endpoint)
    peer.socket.send(b"hello")
    assert await take(taken) == [b"hello"]
    peer.close()
    wire.close()


async def test_a_message_to_nobody_is_dropped(pair):
    wire, _, _ = pair
    wire.send("nobody", [b"x"])


@pytest.mark.parametrize("address", ["ipc://{}/no/such/folder/x", "udp://{}", "tcp://nowhere"])
async def test_an_address_that_cannot_be(tmp_path, address):
    with pytest.raises(OSError, match="cannot listen"):
        Wire(address.format(tmp_path), lambda name, frames: None).open()
