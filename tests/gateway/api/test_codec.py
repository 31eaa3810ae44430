import pytest
from voltapile.gateway.api import codec

LOADS = [codec._loads_fast, codec._loads_slow]
BAD = [
    b"",
    b"{",
    b'{"a": NaN}',
    b'{"a": Infinity}',
    b'{"a": "\xff"}',
    b'{"a": "\\ud800"}',
    b"[" * 100_000 + b"]" * 100_000,
    b"\xef\xbb\xbf{}",
]


@pytest.mark.parametrize("loads", LOADS)
@pytest.mark.parametrize("data", BAD, ids=range(len(BAD)))
def test_bytes_that_are_not_json_are_refused(loads, data):
    with pytest.raises(codec.JsonError):
        loads(data)


@pytest.mark.parametrize("loads", LOADS)
def test_both_readers_agree(loads):
    data = '{"a": [1, 2.5, true, null, "é\\u00e9\\ud83d\\ude00"]}'.encode()
    assert loads(data) == {"a": [1, 2.5, True, None, "éé😀"]}


@pytest.mark.parametrize("dumps", [codec.dumps, codec._dumps_slow])
def test_writers_are_compact_utf8(dumps):
    assert dumps({"a": ["é", 1, None]}) == '{"a":["é",1,null]}'.encode()
