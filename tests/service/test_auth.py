"""Tokens and roles."""

from __future__ import annotations

from pathlib import Path

import pytest

from replaybuf.errors import Forbidden, Unauthorized
from replaybuf.service.http.guard.auth import Tokens
from replaybuf.service.http.guard.token_file import new_token


def test_a_wrong_role_is_refused_with_the_roles_of_the_call_and_what_to_do(tmp_path: Path) -> None:
    """The operator may make every call, so the message names it, also where no other role may."""
    path = tmp_path / "tokens"
    header = f"Bearer {new_token('reader', 'grafana', path)}"
    tokens = Tokens.read(path)
    tokens.check(header, frozenset({"reader"}))
    expected = (
        r"token 'grafana' has the role reader; this call needs producer or operator\. Use a token with such a role: "
        r"replaybuf tokens new --role producer$"
    )
    with pytest.raises(Forbidden, match=expected) as caught:
        tokens.check(header, frozenset({"producer"}))
    assert (caught.value.value, caught.value.bound) == ("reader", ["producer", "operator"])
    with pytest.raises(Forbidden, match=r"this call needs operator\. Use a token .* --role operator$"):
        tokens.check(header, frozenset())


def test_a_missing_token_and_an_unknown_one_are_two_messages(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    new_token("reader", "grafana", path)
    tokens = Tokens.read(path)
    for header, cause in ((None, "the token is missing"), ("Bearer x", "was not in the tokens file")):
        with pytest.raises(Unauthorized, match=f"{cause}.*Authorization: Bearer TOKEN"):
            tokens.check(header, frozenset({"reader"}))
