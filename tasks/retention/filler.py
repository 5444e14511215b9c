"""Filler prose for haystacks: original sentences without any digit, number word or answer."""

from __future__ import annotations

from kvacc.tasks.retention.draws import Draws

SENTENCES = (
    "The path along the canal was quiet, and the ducks slept under the willows.",
    "A baker swept the steps of his shop while the ovens cooled behind him.",
    "Clouds drifted over the hills and left long shadows on the barley fields.",
    "The librarian repaired the torn cover with linen tape and a steady hand.",
    "Rain fell softly on the roof of the greenhouse and ran down the glass.",
    "Children drew animals in chalk on the pavement until the lamps came on.",
    "An old tram rattled past the market, and its bell rang at the corner.",
    "The carpenter planed the oak board until it felt smooth under his palm.",
    "Somebody had left a bicycle against the wall of the post office.",
    "The river was low that summer, so herons waded far out from the bank.",
    "In the kitchen a pot of soup simmered, and the windows turned misty.",
    "The gardener tied the beans to their poles with pieces of green string.",
    "A cat watched the sparrows from the sill and never moved its tail.",
    "The orchestra tuned its instruments as the audience found its seats.",
    "Fog hid the lighthouse, but its horn could be heard across the bay.",
    "The tailor pinned the hem and asked his customer to turn around.",
    "Snow covered the rails, and the station master lit the stove.",
    "A painter mixed gray with a little blue to match the evening sky.",
    "The goats climbed the slope above the village and grazed on the thyme.",
    "Fresh bread and ripe pears lay on the table beside a jug of water.",
    "The wind turned the mill slowly, and flour dust floated in the light.",
    "A letter arrived from the coast with a pressed flower between its pages.",
    "The blacksmith put out the fire and hung his apron on its hook.",
    "Boats rocked at their moorings while the tide crept up the harbor wall.",
    "The teacher opened the window so that the room would smell of lilac.",
    "A fox crossed the frozen meadow and vanished behind the hedge.",
    "The clockmaker polished a brass wheel and held it up to the lamp.",
    "Travelers warmed their hands by the hearth and talked about the weather.",
    "The orchard was full of bees, and ladders leaned against the plum trees.",
    "A violin was playing somewhere in the house across the courtyard.",
    "The shepherd counted on his dog to bring the flock down before dark.",
    "Blue tiles covered the fountain, and coins glittered at the bottom.",
    "The potter shaped a wide bowl and set it on the shelf to dry.",
    "Leaves gathered in the gutter after the storm and blocked the drain.",
    "The ferry left the pier on time, with gulls gliding in its wake.",
    "A weaver chose dark red wool for the border of the new carpet.",
    "The smell of coffee drifted from the cafe into the narrow street.",
    "Ivy had grown over the gate, and the latch was stiff with rust.",
    "The miner's lamp still hung by the door of the empty cottage.",
    "Swallows flew low over the pond, which often means that rain is near.",
)


def filler(draws: Draws, words: int) -> list[str]:
    """Sentences in random order, of at least ``words`` words together.

    Sentences are dealt like cards: none comes back before all have been used.
    """
    chosen: list[str] = []
    deck: list[str] = []
    count = 0
    while count < words:
        deck = deck or draws.shuffled(SENTENCES)
        chosen.append(deck.pop())
        count += len(chosen[-1].split())
    return chosen
