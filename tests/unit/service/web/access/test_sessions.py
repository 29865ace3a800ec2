"""Sessions of browsers."""

from hvd_transformer.service.web.access.sessions import SECONDS, Sessions


def test_a_session_stands_for_a_token_until_its_end() -> None:
    sessions = Sessions()
    secret = sessions.open("token", 100.0)
    session = sessions.find(secret, 100.0)
    assert session is not None
    assert session.token == "token"
    assert sessions.find(secret, 99.0 + SECONDS) == session
    assert sessions.find(secret, 100.0 + SECONDS) is None
    assert sessions.find(secret, 100.0) is None


def test_a_closed_session_is_none() -> None:
    sessions = Sessions()
    secret, other = sessions.open("token", 0.0), sessions.open("token", 0.0)
    sessions.close(secret)
    sessions.close("unknown")
    assert sessions.find(secret, 1.0) is None
    assert sessions.find(other, 1.0) is not None


def test_secrets_cannot_be_told_from_one_another() -> None:
    sessions = Sessions()
    secrets = [sessions.open("token", 0.0) for _ in range(100)]
    found = [sessions.find(secret, 1.0) for secret in secrets]
    values = {session.csrf for session in found if session is not None}
    assert len(values) == len(set(secrets)) == 100
    assert not values & set(secrets)


def test_the_oldest_end_when_there_are_too_many() -> None:
    sessions = Sessions()
    first = sessions.open("token", 0.0)
    for _ in range(10_000):
        last = sessions.open("token", 0.0)
    assert sessions.find(first, 1.0) is None
    assert sessions.find(last, 1.0) is not None
