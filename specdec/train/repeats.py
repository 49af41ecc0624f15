"""Where a greedy text has begun to go round in a circle."""

from collections.abc import Sequence

# Tokens of the longest circle that is looked for.
MAX_PERIOD = 96
# So many tokens at least must be what stands one period before them; of a circle longer than half
# of that, two rounds.
MIN_REPEATED = 32


def circle_end(tokens: Sequence[int]) -> int | None:
    """Where to end ``tokens`` if its tail only repeats itself, else None.

    The first two rounds are kept: that the text goes round is something to learn, but once.
    """
    end = len(tokens)
    for period in range(1, min(MAX_PERIOD, end - MIN_REPEATED) + 1):
        if tokens[end - 1 - period] != tokens[end - 1]:
            continue
        length = max(2 * period, MIN_REPEATED)
        first = end - length - period
        if first < 0 or tokens[end - length :] != tokens[first : end - period]:
            continue
        while first and tokens[first - 1] == tokens[first - 1 + period]:
            first -= 1
        return first + max(2 * period, MIN_REPEATED // 2)
    return None
