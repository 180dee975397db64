"""Generates short stories from templates and random words."""

from random import Random

from .tasks import Example
from .words import ANIMALS, COLOURS, FOODS, HIDEOUTS, MOODS, NAMES, PLACES, THINGS, WEATHERS

STORY = "story"
STORY_WEIGHT = 2.0


def story(random: Random) -> Example:
    """A random story: the first sentence is the prompt, the rest its answer."""
    name, friend = random.sample(NAMES, 2)
    animal, other = random.sample(ANIMALS, 2)
    mood, place = random.choice(MOODS), random.choice(PLACES)
    opening = f"{name} was {_article(mood)} {mood} {animal} who lived in a {place}."
    thing = f"{random.choice(COLOURS)} {random.choice(THINGS)}"
    noun = thing.split()[-1]
    food, hideout, weather = random.choice(FOODS), random.choice(HIDEOUTS), random.choice(WEATHERS)
    plots = (
        f"One day {name} lost a {thing} and looked everywhere. {friend} the {other} found the {noun} {hideout}. "
        f"{name} was happy.",
        f"One {weather} day {name} met {_article(other)} {other} named {friend} {hideout}. They played with a {thing} "
        "and became good friends.",
        f"{name} was hungry and wanted some {food}. {friend} the {other} had a lot of {food}, and they ate it together "
        f"{hideout}.",
        f"It was {_article(weather)} {weather} day. {name} saw a {thing} {hideout} and gave the {noun} to {friend} the "
        f"{other}. {friend} was happy.",
        f"At night {name} heard a noise {hideout}. It was only {friend} the {other}, who had lost a {thing}. They "
        "laughed and went home.",
    )
    return Example(task=STORY, prompt=opening, answer=f" {random.choice(plots)}", is_text=True)


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"
