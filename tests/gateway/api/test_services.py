import asyncio
import threading

import pytest
from voltapile.gateway.api import services as module
from voltapile.gateway.api.errors import ApiError
from voltapile.gateway.api.services import OFF_LOOP_BYTES, off_loop, read_body


async def test_only_long_input_leaves_the_event_loop():
    here = threading.get_ident()
    assert await off_loop(OFF_LOOP_BYTES - 1, threading.get_ident) == here
    assert await off_loop(OFF_LOOP_BYTES, threading.get_ident) != here


async def test_a_body_that_does_not_come_is_a_408(monkeypatch):
    class SlowRequest:
        async def read(self):
            await asyncio.sleep(60)

    monkeypatch.setattr(module, "BODY_SECONDS", 0.01)
    with pytest.raises(ApiError) as caught:
        await read_body(SlowRequest())
    assert caught.value.status == 408
