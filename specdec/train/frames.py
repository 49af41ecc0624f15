"""Tasks that people set a chat model, as frames to be filled with subjects and with text.

Subjects and texts come from what the target wrote before; the lists here only begin it. All of it
was written for this file, and none of it is from a benchmark or a data set.
"""

import random
import re
from collections.abc import Sequence

# {topic}, {other}: subjects.
TASKS = (
    "Explain {topic} to me.",
    "What is {topic}?",
    "How does {topic} work?",
    "Why is {topic} important?",
    "Tell me something surprising about {topic}.",
    "Compare {topic} and {other}.",
    "What do {topic} and {other} have in common, and where do they differ?",
    "Give me five facts about {topic}.",
    "List the advantages and disadvantages of {topic}.",
    "Write a poem about {topic}.",
    "Write a short story in which {topic} plays a part.",
    "Write a letter to the editor of a newspaper about {topic}.",
    "Draft a friendly email that invites colleagues to a talk on {topic}.",
    "Write an advertisement for a course on {topic}.",
    "Make a lesson plan on {topic} for a class of twelve-year-olds.",
    "Plan a weekend trip for somebody who loves {topic}.",
    "I have an interview about {topic} tomorrow. What will they ask me, and what should I answer?",
    "Give me a step-by-step guide for beginners to {topic}.",
    "What are common mistakes people make with {topic}?",
    "Who should I ask when I have a question on {topic}?",
    "Write a dialogue between two friends who disagree about {topic}.",
    "You are a museum guide. Tell the visitors about {topic}.",
    "You are a sceptical scientist. What do you think of {topic}?",
    "Pretend to be a pirate who has just heard of {topic}.",
    "Act as a travel agent and sell me {topic}.",
    "Argue for {topic}, then argue against it.",
    "What happened in the history of {topic}, in order?",
    "When did {topic} begin?",
    "Where is {topic} found?",
    "Who is known for {topic}?",
    "Name three books or films on {topic} and say what they are about.",
    "Suggest names for a shop that sells things to do with {topic}.",
    "Write a product description for a board game about {topic}.",
    "Make a table of the main terms of {topic} and what they mean.",
    "Write three quiz questions on {topic} with their answers.",
    "Define {topic} in one sentence.",
    "In two sentences: what does {topic} have to do with {other}?",
    "Write a speech of one minute on {topic}.",
    "Write a blog post with headings on {topic}.",
    "Give me a recipe that goes with {topic}.",
    "What would the world look like without {topic}?",
    "Write a Python function that keeps a list of records on {topic} and finds one by name.",
    "Write a small Python class for {topic}, with an example of its use.",
    "Write an SQL query that counts rows of a table about {topic} by year.",
    "Write an HTML page with a heading and a list on {topic}.",
    "Show me JSON with three made-up entries on {topic}.",
    "How do you say in {language} that you like {topic}?",
    "Translate into {language}: I have read a lot about {topic} this week.",
)
# Their answers are sampled throughout: they are the texts that later prompts hold.
WRITINGS = (
    "Write a newspaper article about {topic}.",
    "Write an encyclopedia article about {topic}.",
    "Write a long report on {topic} with names, places and numbers.",
    "Tell me the story of a person whose life was changed by {topic}.",
    "Write a news report on a recent event to do with {topic}.",
    "Write the first page of a novel about {topic}.",
    "Describe {topic} in several paragraphs.",
    "Write an essay on {topic} and {other}.",
    "Write a review of an exhibition on {topic}.",
    "Write a few sentences in {language} about {topic}.",
    "Write a short article about {topic} in {language}.",
)
# {text}: one text.
OVER_TEXT = (
    "Summarize the following text in a few sentences.\n\n{text}",
    "{text}\n\nSummarize the text above.",
    "Give a short summary of this article:\n{text}",
    "Summarize:\n{text}",
    "{text}\n\nTL;DR",
    "What are the main points of the following text? List them.\n\n{text}",
    "Shorten this text to one sentence: {text}",
    "Write a headline and a first paragraph for this:\n\n{text}",
    "Rewrite the following text in simpler words.\n\n{text}",
    "Rewrite this more formally:\n{text}",
    "Rewrite this as an email to a friend.\n\n{text}",
    "Correct the mistakes in this text and return all of it:\n{text}",
    "Extract all names and places from the text below as a list.\n\n{text}",
    "Which numbers and dates does this text hold? {text}",
    "Make a list of keywords for this text:\n{text}",
    "Turn this text into a list of questions and answers:\n\n{text}",
    "Explain the following to a ten-year-old.\n\n{text}",
    "Continue the following text.\n\n{text}",
    "Is this text more positive or more negative, and why?\n\n{text}",
    "Read the passage and answer the question.\n\nPassage: {text}\n\nQuestion: What does it say "
    "about {topic}?",
    "{text}\n\nAccording to this text, what is {topic}?",
    "Text: {text}\n\nWhat can one learn from it about {topic}? Answer briefly.",
)
# {sentences}: a few sentences of a text.
TRANSLATIONS = (
    "Translate the following text to {language}: {sentences}",
    "Translate to {language}:\n{sentences}",
    "{sentences}\n\nTranslate this into {language}.",
    "What is this in {language}? {sentences}",
    "Translate the following text into English: {sentences}",
    "Translate into English:\n{sentences}",
    "Put this into plain English: {sentences}",
)
# {passages}: several texts, one of which is about {topic}.
OVER_PASSAGES = (
    "Answer from these passages.\n\n{passages}\n\nQuestion: What is said about {topic}?",
    "{passages}\n\nWith the help of the texts above: what is {topic}?",
    "Documents:\n{passages}\n\nUsing only the documents, tell me about {topic}.",
    "I found this:\n\n{passages}\n\nWhat does it tell me about {topic}?",
    "Question: how is {topic} described?\n\nSources:\n{passages}\n\nAnswer:",
    "{passages}\n\nWhich of these texts speaks of {topic}, and what does it say?",
    "Search results:\n{passages}\n\nWrite an answer to the question: who or what is {topic}?",
)
FOLLOW_UPS = (
    "Make it shorter.",
    "Please say more about that.",
    "Can you give an example?",
    "Why is that so?",
    "Say it again in simpler words.",
    "Turn your answer into a list.",
    "Turn that into one paragraph.",
    "Now translate your answer into {language}.",
    "Rewrite your answer so that it is more friendly.",
    "Which part of this matters most?",
    "What would somebody who disagrees say?",
    "And what about {topic}?",
    "How does this relate to {topic}?",
    "Now write the same about {topic}.",
    "Are you sure? Check your answer.",
    "Write a title for that.",
    "Give me three more.",
    "Explain the second point.",
    "Thank you. What should I read next?",
    "Summarize what we have said so far.",
)
# {a}, {b}, {c}: numbers; {name}: of a person; {thing}: what can be counted.
SUMS = (
    "{name} has {a} {thing} and buys {b} more every week. How many are there after {c} weeks?",
    "A box holds {a} {thing}. How many boxes does {name} need for {b} of them?",
    "{name} gives away {c} of {b} {thing} each day. After how many days are fewer than {c} left?",
    "{a} children share {b} {thing} equally. How many does each get, and how many are left over?",
    "One of the {thing} costs {c} dollars. {name} has {b} dollars and buys {a}. Is it enough?",
    "{name} walks {c} kilometres an hour. How long do {b} kilometres take?",
    "Of {b} {thing}, {a} percent are broken. How many can {name} still use?",
    "{name} is {a} years old, and a sister is {c} years younger. How old were both {c} years ago?",
    "What is {a} times {b}, less {c}? Show how you get there.",
    "A room is {a} metres long and {c} metres wide. {name} lays tiles of one square metre, at {b} "
    "dollars each. What do they cost?",
)
NAMES = ("Ada", "Bruno", "Chen", "Dalia", "Emil", "Fatima", "Goran", "Hana", "Ivo", "Jamila")
THINGS = ("apples", "books", "marbles", "stamps", "chairs", "candles", "bricks", "cups", "pencils")
LANGUAGES = ("German", "French", "Spanish", "Italian", "Portuguese", "Dutch", "Swedish", "Polish")
# Subjects before the target has written any; later they are mixed with its own.
TOPICS = tuple(
    """
    volcanoes|beekeeping|the printing press|chess|solar power|the Silk Road|sleep|bridges|jazz
    the moon|inflation|vaccination|bread baking|glaciers|Roman law|photography|whales|tea|robots
    democracy|the stock market|earthquakes|knitting|marathon running|antibiotics|lighthouses
    machine learning|the Olympic Games|coral reefs|pottery|the Industrial Revolution|black holes
    remote work|public libraries|dinosaurs|wind turbines|opera|the Great Wall|vitamins|football
    encryption|rice farming|the Renaissance|electric cars|folk tales|gravity|city parks|railways
    the human heart|recycling|chocolate|migratory birds|constitutional courts|video games|comets
    meditation|submarines|the Amazon river|time management|olive oil|compilers|insurance|satellites
    fashion design|the water cycle|ancient Egypt|honey|hiking|elections|databases|snow|theatre
    a job interview|moving house|raising a puppy|a broken laptop|learning the guitar|saving money
    first aid|a vegetable garden|home schooling|jet lag|small talk|a birthday party|tax returns
    penguins|deserts|the Vikings|calculus|probability|perfume|aviation|tides|mushrooms|wool
    nuclear fusion|advertising|the Ottoman Empire|mosquitoes|clocks|steel|hospitals|languages
    """.replace("\n", "|").split("|")
)
TOPICS = tuple(topic.strip() for topic in TOPICS if topic.strip())

_BOLD = re.compile(r"\*\*([^*\n:.]{4,40})\*\*")
_NAME = re.compile(r"\b[A-Z]\w+(?: (?:of|the|and|de|von) [A-Z]\w+| [A-Z]\w+)+")
_LONG_WORD = re.compile(r"\b\w{7,}\b")
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s|\n")


def topics_in(text: str) -> list[str]:
    """What a text names: words in bold, and runs of words with capital letters."""
    found = [*_BOLD.findall(text), *_NAME.findall(text)]
    return [topic.strip() for topic in found if len(topic) <= 60]


def long_words(text: str) -> list[str]:
    """What a text may be asked about where it names nothing."""
    return sorted(set(_LONG_WORD.findall(text)))


def whole_sentences(text: str) -> str:
    """A text that was cut somewhere, up to the end of a sentence where it has one."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text.strip() + " ")]
    return text.strip()[: ends[-1]].strip() if ends else text.strip()


def some_sentences(text: str, rng: random.Random) -> str:
    """One to four sentences that follow each other."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    starts = [0, *ends]
    first = rng.randrange(len(starts))
    last = first + rng.randint(1, 4)
    stop = starts[last] if last < len(starts) else len(text)
    return text[starts[first] : stop].strip() or text


def fill(
    frame: str,
    rng: random.Random,
    texts: Sequence[str] = (),
    topics: Sequence[str] = TOPICS,
) -> str:
    """``frame`` with all its places filled. Frames with texts need one in ``texts`` at least."""
    topic, other = rng.choice(topics), rng.choice(topics)
    text = texts[0] if texts else ""
    passages = "\n\n".join(f"[{i}] {each}" for i, each in enumerate(texts, start=1))
    return frame.format(
        topic=topic,
        other=other,
        language=rng.choice(LANGUAGES),
        text=text,
        sentences=some_sentences(text, rng),
        passages=passages,
        a=rng.randint(3, 40),
        b=rng.randint(20, 400),
        c=rng.randint(2, 12),
        name=rng.choice(NAMES),
        thing=rng.choice(THINGS),
    )
