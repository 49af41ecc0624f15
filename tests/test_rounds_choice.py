"""steps_per_replay="auto": how many steps the next replay takes. No engine, no device."""

from specdec.outputs import StepRecord
from specdec.rounds import AUTO_ROUNDS, Rounds, RoundsChoice


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


def test_records_of_one_round_are_as_before():
    record = StepRecord("NONE", None, 1, 1, 0, None)
    assert (record.rounds, record.rounds_reason) == (1, None)
