import threading

from voltapile.gateway.api.services import OFF_LOOP_BYTES, off_loop


async def test_only_long_input_leaves_the_event_loop():
    here = threading.get_ident()
    assert await off_loop(OFF_LOOP_BYTES - 1, threading.get_ident) == here
    assert await off_loop(OFF_LOOP_BYTES, threading.get_ident) != here
