"""The target writes its own training text: user messages, then answers, many at once."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec.engine import Engine
from specdec.params import SamplingParams
from specdec.request import Request
from specdec.tokenizer import Tokenizer
from specdec.train.corpus import Document
from specdec.train.prompts import Prompt
from specdec.train.repeats import circle_end
from specdec.train.settings import MIN_ANSWER_TOKENS, TrainSettings
from specdec.train.tasks import Shelf, Tasks
from specdec.train.template import ChatPieces

# Every so many documents one is kept from training. Its answers are greedy: it is what acceptance
# is measured on.
HELD_OUT_EVERY = 50
# Sampling temperatures of user messages, and of what is sampled of an answer. At 1 a small model
# often writes no sense, which is no text to summarise.
USER_TEMPERATURES = (0.7, 1.0)
TEMPERATURES = (0.5, 0.8)
# A user message of the model's own is at least this long.
MIN_USER_TOKENS = 3
# A greedy answer is looked at every so many tokens: where it only repeats itself it ends.
TOKENS_PER_LOOK = 16
# A text that later prompts are to hold may be so many times as long as an answer.
WRITING_LENGTH = 2
# New requests start together once so many rows are free: each start costs a step with prompts.
ARRIVALS = 8

Progress = Callable[[int], None]
Deadline = Callable[[], bool]


def is_held_out(number: int) -> bool:
    return number % HELD_OUT_EVERY == 0


@dataclass(slots=True)
class Plan:
    """One document to be written: who says what, and how answers open."""

    document: Document
    turns: list[Prompt | None]  # one per turn; None: the target writes the user's message
    temperature: float
    num_sampled: int  # tokens that each answer opens with before it is greedy; 0: all greedy
    max_answer: int
    rng: random.Random
    is_whole: bool = True  # False once a message did not fit or time ran out


@dataclass(slots=True)
class _Job:
    plan: Plan
    prompt: list[int]
    params: SamplingParams
    on_tokens: Callable[[list[int]], None]
    request: Request | None = field(default=None)
    num_seen: int = 0  # tokens of the output that were looked at for circles

    @property
    def circle(self) -> int | None:
        """Where a greedy output that repeats itself should end.

        It is looked at in the same places however many tokens a step brings.
        """
        assert self.request is not None
        output = self.request.output_ids
        while self.params.temperature == 0 and self.num_seen + TOKENS_PER_LOOK <= len(output):
            self.num_seen += TOKENS_PER_LOOK
            end = circle_end(output[: self.num_seen])
            if end is not None:
                return end
        return None


class Writer:
    """Writes documents with an engine over the target. ``tokenizer`` None: token ids alone."""

    def __init__(
        self,
        engine: Engine,
        pieces: ChatPieces,
        tokenizer: Tokenizer | None,
        settings: TrainSettings,
        prompts: Sequence[Prompt] = (),
    ) -> None:
        self.engine = engine
        self.pieces = pieces
        self.tokenizer = tokenizer
        self.settings = settings
        self.prompts = prompts
        self.num_skipped = 0  # prompts from a file that leave no room for an answer
        self._max_seqs = engine.config.max_num_seqs or settings.num_seqs
        vocab_size = engine.model_config.vocab_size
        self._vocab_size = min(vocab_size, tokenizer.vocab_size) if tokenizer else vocab_size
        self._ends = set(engine.model_config.eos_token_ids)
        if pieces.user_end is not None:
            self._ends.add(pieces.user_end)

    def plan(self, number: int, shelf: Shelf) -> Plan:
        """Document ``number``'s plan: the same whenever it is made, for the same ``shelf``."""
        settings = self.settings
        rng = random.Random(settings.seed * 2**32 + number)
        is_sampled = rng.random() >= settings.greedy_share
        turns: list[Prompt | None] = [None]
        is_writing = False
        if self.prompts and rng.random() < settings.data_share:
            prompt = self.prompts[number % len(self.prompts)]
            rest = [Prompt((turn,)) for turn in prompt.turns[1:]] if self.pieces.again else []
            turns = [prompt, *rest]
        elif self.tokenizer is not None and self.pieces.user_end is not None:
            tasks = Tasks(settings, rng, shelf)
            turns, is_writing = tasks.turns(follow=self.pieces.again is not None)
        max_answer = settings.max_answer_tokens * (WRITING_LENGTH if is_writing else 1)
        num_sampled = max_answer if is_writing else settings.opening_tokens * is_sampled
        if is_held_out(number):
            num_sampled = 0
        return Plan(
            Document(number, num_sampled == 0),
            turns,
            temperature=rng.choice(TEMPERATURES) if num_sampled else 0.0,
            num_sampled=num_sampled,
            max_answer=max_answer,
            rng=rng,
        )

    def write(self, plans: Sequence[Plan], out_of_time: Deadline, progress: Progress) -> None:
        """Write all documents, turn by turn; where time runs out they end as they are then.

        Sampled tokens come first and together: one sampled row makes a step of all rows dearer.
        """
        for turn in range(max((len(plan.turns) for plan in plans), default=0)):
            active = [plan for plan in plans if plan.is_whole and turn < len(plan.turns)]
            self._run([self._user_job(plan, turn) for plan in active], out_of_time, progress)
            active = [plan for plan in active if plan.is_whole and self._has_room(plan)]
            for plan in active:
                start = len(plan.document.tokens)
                plan.document.spans.append((start, start))
            openings = [self._opening_job(plan, turn) for plan in active if plan.num_sampled]
            self._run(openings, out_of_time, progress)
            self._run([self._answer_job(plan) for plan in active], out_of_time, progress)
            for plan in active:
                start, end = plan.document.spans[-1]
                if end == start:
                    plan.document.spans.pop()
        for plan in plans:
            # A last message that nobody answered is no text to learn from.
            ends = [end for _, end in plan.document.spans]
            del plan.document.tokens[ends[-1] if ends else 0 :]

    # -- one message ------------------------------------------------------------------------------

    def _user_job(self, plan: Plan, turn: int) -> _Job | None:
        """The user's message: put in place where it is known, else a request for it."""
        tokens = plan.document.tokens
        tokens += self._before_user(plan, turn)
        message = self._given_message(plan, turn)
        if message is not None:
            tokens += message
            return None
        pieces, settings = self.pieces, self.settings
        if not tokens:
            # Without a beginning-of-text token a text starts with any token.
            tokens.append(plan.rng.randrange(self._vocab_size))
        length = settings.max_user_tokens
        if pieces.user_end is None:
            length = plan.rng.randint(min(8, length), length)
        length = min(length, settings.seq_len - len(tokens) - MIN_ANSWER_TOKENS)
        if length < 1:
            plan.is_whole = False
            return None
        params = SamplingParams(
            max_new_tokens=length,
            temperature=plan.rng.choice(USER_TEMPERATURES),
            seed=self._seed(plan, 2 * turn),
            stop_token_ids=None if pieces.user_end is None else [pieces.user_end],
            min_tokens=min(MIN_USER_TOKENS, length),
        )

        def done(new: list[int]) -> None:
            if pieces.user_end is not None and new and new[-1] in self._ends:
                new = new[:-1]
            plan.document.tokens += [*new, *pieces.reply]

        return _Job(plan, list(tokens), params, done)

    def _before_user(self, plan: Plan, turn: int) -> list[int]:
        if turn == 0:
            # A prompt of a file brings its own, with its system message.
            return [] if plan.turns[0] is not None else list(self.pieces.opening)
        again = list(self.pieces.again or ())
        last = plan.document.tokens[-1]
        return again[1:] if again and again[0] == last else again

    def _given_message(self, plan: Plan, turn: int) -> list[int] | None:
        """The message and what follows it up to the answer; None where the target writes it."""
        prompt = plan.turns[turn]
        if prompt is None:
            return None
        tokenizer = self.tokenizer
        assert tokenizer is not None
        if not tokenizer.is_chat:
            return tokenizer.encode(prompt.turns[0])
        if turn == 0:
            text = tokenizer.apply_chat_template(prompt.first_messages())
            return tokenizer.encode(text, add_special_tokens=False)
        ids = tokenizer.encode(prompt.turns[0], add_special_tokens=False)
        return [*ids, *self.pieces.reply]

    def _has_room(self, plan: Plan) -> bool:
        if len(plan.document.tokens) + MIN_ANSWER_TOKENS <= self.settings.seq_len:
            return True
        self.num_skipped += not plan.document.spans
        plan.is_whole = False
        return False

    def _opening_job(self, plan: Plan, turn: int) -> _Job:
        params = SamplingParams(
            max_new_tokens=min(plan.num_sampled, self._room(plan)),
            temperature=plan.temperature,
            seed=self._seed(plan, 2 * turn + 1),
        )
        return self._job_for_answer(plan, params)

    def _answer_job(self, plan: Plan) -> _Job | None:
        start, end = plan.document.spans[-1]
        room = min(self._room(plan), plan.max_answer - (end - start))
        has_ended = end > start and plan.document.tokens[-1] in self._ends
        if room < 1 or has_ended or not plan.is_whole:
            return None
        return self._job_for_answer(plan, SamplingParams(max_new_tokens=room))

    def _job_for_answer(self, plan: Plan, params: SamplingParams) -> _Job:
        def done(new: list[int]) -> None:
            document = plan.document
            document.tokens += new
            document.spans[-1] = (document.spans[-1][0], len(document.tokens))

        return _Job(plan, list(plan.document.tokens), params, done)

    def _room(self, plan: Plan) -> int:
        return self.settings.seq_len - len(plan.document.tokens)

    def _seed(self, plan: Plan, part: int) -> int:
        return ((self.settings.seed * 2**24 + plan.document.number) * 64 + part) % 2**64

    # -- the engine -------------------------------------------------------------------------------

    def _run(self, jobs: Sequence[_Job | None], out_of_time: Deadline, progress: Progress) -> None:
        """Run the requests; those that time ran out for give what they have, or nothing."""
        waiting = [job for job in jobs if job is not None][::-1]
        running: list[_Job] = []
        arrivals = max(self._max_seqs // ARRIVALS, 1)
        while (waiting or running) and not out_of_time():
            if len(running) <= self._max_seqs - min(arrivals, max(len(waiting), 1)):
                while waiting and len(running) < self._max_seqs:
                    job = waiting.pop()
                    (job.request,) = self.engine.add_request(job.prompt, job.params)
                    running.append(job)
            self.engine.step()
            still = []
            for job in running:
                assert job.request is not None
                if job.request.error is not None:
                    raise RuntimeError(f"a text ended in error: {job.request.error}")
                end = job.circle
                if end is not None:
                    self.engine.abort_all([job.request])
                elif job.request.finish_reason is None:
                    still.append(job)
                    continue
                job.on_tokens(job.request.output_ids[:end])
                progress(len(job.request.output_ids[:end]))
            running = still
        for job in [*running, *waiting]:
            job.plan.is_whole = False
            if job.request is not None:
                self.engine.abort_all([job.request])
                if job.plan.document.spans:
                    job.on_tokens(job.request.output_ids)
                    progress(len(job.request.output_ids))
