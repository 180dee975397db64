"""The words of tasks and stories. They are few, so that a small model sees each word often."""

NAMES = ("Tom", "Anna", "Mia", "Ben", "Lily", "Max", "Eva", "Sam", "Nora", "Leo", "Ida", "Paul")
ANIMALS = ("cat", "dog", "bird", "mouse", "rabbit", "fox", "duck", "horse", "frog", "bear")
THINGS = ("ball", "kite", "cup", "book", "hat", "drum", "boat", "lamp", "key", "bell", "coat", "spoon")
COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "pink")
PLACES = ("garden", "forest", "house", "barn", "village", "tower", "mill", "castle")
HIDEOUTS = (
    "under the bridge",
    "behind the door",
    "near the river",
    "in the tall grass",
    "under the old tree",
    "on the hill",
)
MOODS = ("small", "brave", "quiet", "kind", "clever", "shy", "old", "funny")
WEATHERS = ("sunny", "rainy", "windy", "cold", "warm", "foggy")
FOODS = ("bread", "soup", "cake", "honey", "cheese", "milk", "jam", "rice")
NOUNS = (*ANIMALS, *THINGS, *PLACES, *FOODS, "river", "stone", "tree", "cloud", "moon", "star", "road", "snow")
WORDS = (*NOUNS, *COLOURS, *MOODS)
