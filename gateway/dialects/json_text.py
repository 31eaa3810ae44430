"""JsonScanner: JSON that arrives in pieces, checked as it comes.

What it has given out so far can always be made whole (`closing`), so that the pieces of a tool
call's arguments join to valid JSON, whatever the model writes. It knows nothing of tools.
"""

from __future__ import annotations

import json
import re

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = " \t\r\n"
_LOST = "\\ufffd"
_CONTROL = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


class JsonScanner:
    """feed(text) -> what is certain; `used` of it were read. is_done: the value is complete.
    is_broken: it is not JSON from there on.

    An escape, a number or a word leaves when what follows shows that it stands; a comma and a
    member's name with the value behind them, so that nothing is made up to close them.
    """

    def __init__(self) -> None:
        self.is_done = self.is_broken = False
        self.used = 0
        self._stack: list[str] = []  # what closes each open object and list
        self._state = "value"  # value, item, key, name, colon, after, string
        self._held = ""  # an escape, a number or a word that is not complete
        self._high = ""  # the escape of the first half of a surrogate pair
        self._ahead = ""  # a comma, a name and its colon, until a value follows
        self._is_name = False  # the open string
        self._out: list[str] = []

    def feed(self, text: str) -> str:
        self.used, self._out = 0, []
        while self.used < len(text) and not self.is_done and not self.is_broken:
            if self._state == "string":
                self._in_string(text)
            elif self._held:
                self._in_word(text[self.used])
            else:
                self._between(text[self.used])
        return "".join(self._out)

    def closing(self) -> str:
        """What makes valid JSON of all that was given out."""
        text = ""
        if self._state == "string" and not self._is_name:
            text = '"'
        elif self._state == "value" and not self._stack:
            text = "null"
        return text + "".join(reversed(self._stack))

    def _give(self, text: str) -> None:
        if self._high:
            text, self._high = _LOST + text, ""
        if self._is_name:
            self._ahead += text
            return
        self._out.append(self._ahead + text)
        self._ahead = ""

    def _in_string(self, text: str) -> None:
        if self._held:
            self._escape(text[self.used])
            return
        if (plain := _PLAIN.match(text, self.used)) is not None:
            self._give(plain[0])
            self.used = plain.end()
            return
        character = text[self.used]
        self.used += 1
        if character == "\\":
            self._held = "\\"
        elif character == '"':
            self._give('"')
            self._end("colon" if self._is_name else "after")
            self._is_name = False
        else:  # models write raw line ends now and then
            self._give(_CONTROL.get(character, f"\\u{ord(character):04x}"))

    def _escape(self, character: str) -> None:
        held = self._held + character
        is_hex = held[1] == "u" and all(c in "0123456789abcdefABCDEF" for c in held[2:])
        if not is_hex and (len(held) > 2 or character not in '"\\/bfnrt'):
            self.is_broken = True
            return
        self.used += 1
        self._held = held
        if not is_hex or len(held) == 6:
            self._held = ""
            self._give_escape(held)

    def _give_escape(self, escape: str) -> None:
        """Halves of a pair leave together; alone they are no character."""
        code = int(escape[2:], 16) if escape[1] == "u" else 0
        if 0xDC00 <= code < 0xE000:
            escape = self._high + escape if self._high else _LOST
            self._high = ""
        is_high = 0xD800 <= code < 0xDC00
        if not is_high or self._high:
            self._give("" if is_high else escape)
        if is_high:
            self._high = escape

    def _in_word(self, character: str) -> None:
        if character not in ",]}" and character not in _SPACE:
            self._held += character
            self.used += 1
            self.is_broken = len(self._held) > 400
            return
        try:
            json.loads(self._held, parse_constant=int)
        except ValueError:
            self.is_broken = True
            return
        self._give(self._held)
        self._held = ""
        self._end("after")

    def _between(self, character: str) -> None:
        """Between strings and words."""
        self.used += 1
        if character in _SPACE:
            return
        state, closes = self._state, bool(self._stack) and character == self._stack[-1]
        if closes and not self._ahead and state in ("after", "item", "key"):
            self._give(self._stack.pop())
            self._end("after")
        elif state == "after" and character == "," and self._stack:
            self._ahead = ","
            self._state = "name" if self._stack[-1] == "}" else "value"
        elif state == "colon" and character == ":":
            self._ahead += ":"
            self._state = "value"
        elif state in ("key", "name") and character == '"':
            self._open_string(is_name=True)
        elif state in ("value", "item"):
            self._value(character)
        else:
            self._break()

    def _value(self, character: str) -> None:
        if character == '"':
            self._open_string(is_name=False)
        elif character in "{[":
            self._give(character)
            self._stack.append("}" if character == "{" else "]")
            self._state = "key" if character == "{" else "item"
        elif character in "-0123456789tfn":
            self._held = character
        else:
            self._break()

    def _open_string(self, is_name: bool) -> None:
        self._is_name, self._state = is_name, "string"
        self._give('"')

    def _end(self, state: str) -> None:
        self._state = state
        self.is_done = not self._stack and state == "after"

    def _break(self) -> None:
        self.used -= 1
        self.is_broken = True
