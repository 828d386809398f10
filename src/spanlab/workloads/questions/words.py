"""Words of made-up facts: given names, things that one can lend, cities."""

_NAMES = """
Ada Agnes Alan Albert Alice Amelia Anna Arthur Aron Bella Ben Bruno Carla Carl Cecil Clara Colin Cora Daisy Daniel
David Diana Dora Edgar Edith Edwin Ella Elsa Emil Emma Eric Esther Eva Felix Flora Frank Frida George Gina Grace
Greta Hanna Harold Hector Helen Henry Hugo Ida Ines Irene Iris Ivan Jane Jasper Joan Jonas Julia Karl Kate Klara
Laura Lena Leo Lily Linda Louis Lucy Lukas Mara Marco Maria Martin Max Mira Nora Oliver Olga Oscar Paula Peter
Philip Rita Robert Rosa Ruth Simon Sofia Stella Theo Thomas Tina Tom Ursula Vera Victor Walter
"""
NAMES = tuple(_NAMES.split())
_THINGS = """
anchor apron axe basket bell bicycle blanket boat bowl broom bucket camera candle canoe carpet chain chair chest
clock coat compass crown cup desk diary doll drum easel fan flag flute globe guitar hammer harp hat helmet kettle
kite knife ladder lamp lantern loom map mask mirror needle oar organ paddle piano pipe plough pot purse ring robe
rope saddle saw scarf shield shovel sled spade spoon stamp statue sword tent trumpet trunk umbrella vase violin
wagon wheel whistle
"""
THINGS = tuple(_THINGS.split())
_CITIES = """
Accra Amsterdam Athens Austin Baghdad Barcelona Beijing Berlin Bombay Boston Brussels Budapest Cairo Chicago Dallas
Delhi Denver Dublin Edinburgh Florence Geneva Glasgow Hamburg Havana Helsinki Houston Istanbul Jakarta Jerusalem
Lagos Leeds Lima Lisbon Liverpool London Madrid Manila Melbourne Miami Milan Montreal Moscow Munich Nairobi Naples
Oslo Oxford Paris Portland Prague Quebec Rome Santiago Seattle Shanghai Stockholm Sydney Tokyo Toronto Venice Vienna
Warsaw Washington Zurich
"""
CITIES = tuple(_CITIES.split())
