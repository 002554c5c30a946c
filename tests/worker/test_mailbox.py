from __future__ import annotations

import threading
import time

import pytest

from worker.mailbox import Mailbox, MailboxFull


def test_events_come_out_in_the_order_they_went_in() -> None:
    box: Mailbox[int] = Mailbox()
    for i in range(5):
        box.post(i)
    assert box.take(0) == [0, 1, 2, 3, 4]
    assert box.take(0) == []


def test_a_post_wakes_the_taker() -> None:
    box: Mailbox[int] = Mailbox()
    threading.Timer(0.01, box.post, (7,)).start()
    started = time.monotonic()
    assert box.take(30.0) == [7]
    assert time.monotonic() - started < 10.0


def test_one_more_than_the_limit_is_refused() -> None:
    box: Mailbox[int] = Mailbox(limit=2)
    box.post(1)
    box.post(2)
    with pytest.raises(MailboxFull, match="2 events"):
        box.post(3)


def test_bulk_room_comes_back_when_taken_and_who_waits_is_told() -> None:
    box: Mailbox[int] = Mailbox(bulk_limit_bytes=100)
    told: list[str] = []
    box.post(1, bulk_bytes=100)
    assert not box.has_room()
    box.when_taken(lambda: told.append("taken"))
    assert told == []
    box.take(0)
    assert told == ["taken"]
    assert box.has_room()


def test_after_close_posts_are_dropped_and_nobody_waits() -> None:
    box: Mailbox[int] = Mailbox()
    box.close()
    box.post(1)
    assert box.take(None) == []
    assert box.has_room()


def test_many_posters_lose_nothing() -> None:
    box: Mailbox[tuple[int, int]] = Mailbox()
    threads = [
        threading.Thread(target=lambda n=n: [box.post((n, i)) for i in range(500)], daemon=True) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    got: list[tuple[int, int]] = []
    deadline = time.monotonic() + 20
    while len(got) < 2000 and time.monotonic() < deadline:
        got += box.take(0.1)
    for thread in threads:
        thread.join()
    assert {n: [i for m, i in got if m == n] for n in range(4)} == {n: list(range(500)) for n in range(4)}


def test_an_ending_is_taken_also_when_the_mailbox_is_full() -> None:
    mailbox: Mailbox[str] = Mailbox(limit=2)
    mailbox.post("begun")
    mailbox.post("more")
    with pytest.raises(MailboxFull):
        mailbox.post("too much")
    mailbox.post("ended", must=True)
    assert mailbox.take(0) == ["begun", "more", "ended"]
