"""steps_per_replay="auto": how many steps the next replay takes. No engine, no device."""

from specdec.outputs import StepRecord
from specdec.rounds import AUTO_ROUNDS, OUTLASTS, Rounds, RoundsChoice


class Text:
    def __init__(self, streamed):
        self.streamed = streamed


def test_auto_takes_several_where_the_host_is_the_limit():
    choice = RoundsChoice("auto")
    batch = [Text(False), Text(False)]
    assert choice.counts == (AUTO_ROUNDS,) and not choice.is_asked_for
    assert choice.choose(batch).count == 1
    for _ in range(100):
        choice.observe(1, seconds=400e-6, waited=0.0)
    assert choice.choose(batch) == Rounds(AUTO_ROUNDS)
    assert choice.choose([Text(False), Text(True)]).reason == "auto: a text is streamed"
    # Four rounds in 500 us: a step of the GPU is shorter than the 400 us of the host.
    choice.observe(AUTO_ROUNDS, seconds=500e-6, waited=100e-6)
    assert choice.choose(batch).count == AUTO_ROUNDS
    # Longer texts: a step now outlasts the host's work, and stays with one round.
    choice.observe(AUTO_ROUNDS, seconds=2000e-6, waited=1600e-6)
    assert choice.choose(batch).count == 1
    for _ in range(50):
        choice.observe(1, seconds=500e-6, waited=100e-6)
    assert choice.choose(batch).count == 1


def test_auto_keeps_to_one_where_the_gpu_is_the_limit():
    choice = RoundsChoice("auto")
    for _ in range(200):
        choice.observe(1, seconds=4e-3, waited=3.7e-3)
    assert choice.choose([]).count == 1
    fixed, never = RoundsChoice(3), RoundsChoice(3, "no graphs")
    assert (fixed.counts, never.counts) == ((3,), ())
    assert (fixed.is_asked_for, never.is_asked_for) == (True, False)
    assert never.choose([]) == Rounds(1, "no graphs")
    assert RoundsChoice(1).choose([]) == Rounds()


def test_only_sizes_at_which_the_host_may_be_the_limit_get_graphs():
    """A small model on one H200: short steps, and host work that grows with the requests."""
    choice = RoundsChoice("auto")
    assert choice.is_undecided
    replay = {1: 0.7e-3, 8: 0.8e-3, 32: 1.1e-3, 64: 1.7e-3}
    assert choice.decide(replay) == {32, 64}
    assert not choice.is_undecided and choice.counts == (AUTO_ROUNDS,)
    for _ in range(100):
        choice.observe(1, seconds=1.7e-3, waited=0.0)
    assert choice.choose([Text(False)] * 64) == Rounds(AUTO_ROUNDS)
    assert choice.choose([Text(False)] * 20) == Rounds(AUTO_ROUNDS)
    # No padding of one request to a graph for 32.
    assert choice.choose([Text(False)]) == Rounds(1, OUTLASTS)
    assert choice.choose([Text(False)] * 65) == Rounds(1, OUTLASTS)


def test_a_replay_much_longer_than_the_host_s_work_gets_none():
    choice = RoundsChoice("auto")
    assert choice.decide({size: 4.3e-3 for size in (1, 8, 64)}) == set()
    assert choice.counts == ()
    for _ in range(100):
        choice.observe(1, seconds=4.3e-3, waited=0.0)
    assert choice.choose([Text(False)]) == Rounds(1, OUTLASTS)
    assert not RoundsChoice(4).is_undecided and not RoundsChoice("auto", "never").is_undecided


def test_records_of_one_round_are_as_before():
    record = StepRecord("NONE", None, 1, 1, 0, None)
    assert (record.rounds, record.rounds_reason) == (1, None)
