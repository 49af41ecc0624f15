"""``specdec doctor``: what an engine would be, whether its drafter fits, whether it is exact."""
