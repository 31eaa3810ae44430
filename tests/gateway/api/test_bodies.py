"""The records of /openapi.json name what the parsers read, no more and no less."""

import json

import msgspec
import pytest
from voltapile.gateway.api import bodies, codec
from voltapile.gateway.api.embeddings import embeddings_request
from voltapile.gateway.api.fields import Fields
from voltapile.gateway.api.messages_schema import messages_request
from voltapile.gateway.api.native_schema import REFUSED, native_request
from voltapile.gateway.api.options import UNSUPPORTED
from voltapile.gateway.api.schema import chat_request, completion_request

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
CASES = {
    bodies.ChatBody: (chat_request, CHAT),
    bodies.CompletionBody: (completion_request, {"prompt": "hi"}),
    bodies.NativeBody: (native_request, {"prompt": "hi"}),
    bodies.EmbeddingsBody: (embeddings_request, {"input": "hi"}),
    bodies.MessagesBody: (messages_request, CHAT),
}
# Read only to be refused, or under another name of the same record.
UNTOLD = {*UNSUPPORTED, *REFUSED, "dimensions"}
OWN = {bodies.NativeBody: {"n_probs"}}  # told, though another route refuses it


class Seen(dict):
    """Remembers what it was asked for."""

    names = frozenset()

    def get(self, name, default=None):
        self.names.add(name)
        return super().get(name, default)

    def __contains__(self, name):
        self.names.add(name)
        return super().__contains__(name)


@pytest.mark.parametrize("record", CASES, ids=lambda record: record.__name__)
def test_a_record_names_what_is_read(monkeypatch, record):
    read, body = CASES[record]
    seen = set()
    monkeypatch.setattr(Seen, "names", seen)
    monkeypatch.setattr(codec, "loads", lambda data: Seen(json.loads(data)))
    if record is bodies.NativeBody:  # which reads a renamed copy, too
        first = Fields.__init__

        def watched(self, values, prefix=""):
            first(self, values if prefix else Seen(values), prefix)

        monkeypatch.setattr(Fields, "__init__", watched)
    read(json.dumps(body).encode(), 256)
    told = {field.encode_name for field in msgspec.structs.fields(record)}
    own = OWN.get(record, set())
    assert seen - UNTOLD | own == told


def test_it_can_fail(monkeypatch):
    monkeypatch.setattr(Seen, "names", seen := set())
    assert "x" not in Seen({})
    Seen({}).get("y")
    assert seen == {"x", "y"}
