"""Counts that stand still, and nothing else, tell which process is missing."""

import threading
import time

import pytest

from lockstep.train import watch
from lockstep.train.watch import LEFT, Watch


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "BEAT", 0.02)


class Peers:
    """Process 0 is this one; how far each of the others has counted by a beat is told."""

    def __init__(self, *others: int | str) -> None:
        self.others = others

    def beat(self, count: int) -> list[int]:
        if "keeper" in self.others and count:
            raise RuntimeError("connection reset")
        counts = {"alive": count, "slow": count // 3, "keeper": 0}
        return [count, *(counts[each] if isinstance(each, str) else each for each in self.others)]


def missing(peers: Peers, seconds: float = 60.0) -> list[int]:
    found: list[list[int]] = []
    done = threading.Event()

    def end(ranks: list[int]) -> None:
        found.append(ranks)
        done.set()

    with Watch(peers.beat, end):
        done.wait(seconds)
    return found[0] if found else []


def test_a_count_that_stands_still_is_named() -> None:
    assert missing(Peers("alive", 7, "slow")) == [2]


def test_who_counts_or_has_left_is_not_missing() -> None:
    assert missing(Peers("alive", "slow", LEFT), seconds=0.6) == []


def test_where_nobody_answers_it_is_process_0() -> None:
    assert missing(Peers("keeper", "alive")) == [0]


def test_after_a_failed_exchange_who_is_silent_is_named_at_once() -> None:
    with Watch(Peers("alive", 7).beat, lambda ranks: None) as others:
        end = time.monotonic() + 60
        while others.missing() != [2] and time.monotonic() < end:
            time.sleep(0.02)
        assert others.missing() == [2]


def test_one_process_watches_nobody() -> None:
    with Watch(lambda count: [], lambda ranks: pytest.fail("called")) as others:
        time.sleep(0.1)
        assert others.missing() == []
