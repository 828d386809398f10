"""Words of synthetic facts: given names, items to lend, cities."""

_NAMES = """
Ada Agnes Alan Albert Alice Amelia Anna Arthur Aron Bella Ben Bruno Carla Carl Cecil Clara Colin Cora Daisy Daniel
David Diana Dora Edgar Edith Edwin Ella Elsa Emil Emma Eric Esther Eva Felix Flora Frank Frida George Gina Grace
Greta Hanna Harold Hector Helen Henry Hugo Ida Ines Irene Iris Ivan Jane Jasper Joan Jonas Julia Karl Kate Klara
Laura Lena Leo Lily Linda Louis Lucy Lukas Mara Marco Maria Martin Max Mira Nora Oliver Olga Oscar Paula Peter
Philip Rita Robert Rosa Ruth Simon Sofia Stella Theo Thomas Tina Tom Ursula Vera Victor Walter
"""
NAMES = tuple(_NAMES.split())
_ITEMS = """
anchor apron axe basket bell bicycle blanket boat bowl broom bucket camera candle canoe carpet chain chair chest
clock coat compass crown cup desk diary doll drum easel fan flag flute globe guitar hammer harp hat helmet kettle
kite knife ladder lamp lantern loom map mask mirror needle oar organ paddle piano pipe plough pot purse ring robe
rope saddle saw scarf shield shovel sled spade spoon stamp statue sword tent trumpet trunk umbrella vase violin
wagon wheel whistle
"""
ITEMS = tuple(_ITEMS.split())
_CITIES = """
Accra Amsterdam Athens Austin Baghdad Barcelona Beijing Berlin Bombay Boston Brussels Budapest Cairo Chicago Dallas
Delhi Denver Dublin Edinburgh Florence Geneva Glasgow Hamburg Havana Helsinki Houston Istanbul Jakarta Jerusalem
Lagos Leeds Lima Lisbon Liverpool London Madrid Manila Melbourne Miami Milan Montreal Moscow Munich Nairobi Naples
Oslo Oxford Paris Portland Prague Quebec Rome Santiago Seattle Shanghai Stockholm Sydney Tokyo Toronto Venice Vienna
Warsaw Washington Zurich
"""
CITIES = tuple(_CITIES.split())
#: Sentences without facts about the items.
REMARKS = (
    "The winter was long and the roads were icy.",
    "A letter takes three days when the weather is fine.",
    "The market opens early and closes at noon.",
    "Old friends meet again in spring.",
    "The bridge was painted green last year.",
    "It rained for a week, and then the sun came out.",
    "Bread is cheaper than it was in autumn.",
    "The children learned to swim in the lake.",
    "A new school was built behind the church.",
    "The train was late, so everybody had tea.",
    "Apples were stored in the cellar until March.",
    "The garden needs water twice a day.",
    "Nobody remembers who planted the big oak.",
    "The neighbours sang until late at night.",
    "A storm broke two windows of the library.",
    "The baker sleeps in the afternoon.",
    "Snow fell on the hills before the harvest was in.",
    "The river is too cold for swimming in May.",
    "Every guest brought a cake to the party.",
    "The cat sat by the fire and watched the door.",
    "A tall stranger asked for the way to the harbour.",
    "The museum is closed on Mondays.",
    "They counted the stars and fell asleep.",
    "The road along the coast is narrow and steep.",
)
