"""The text on which the demo measures perplexity, written for this purpose, and the questions it asks."""

TEXT = """\
The lighthouse at the end of the long bay had not been lit for nine winters when Marta came to look after it. \
The council had offered her the post because nobody else had asked for it, and because she had once repaired the \
clock of the town hall with nothing but a file and a great deal of patience. She arrived in March, on a grey \
morning, with two suitcases, a box of books and a small black dog that was afraid of gulls.

The tower was dry, which surprised her. The stairs were worn in the middle, where two centuries of keepers had put \
their feet, and the walls were painted the dull green of old hospitals. At the top there was a round room with a \
stove, a table, and the lamp itself: a cage of glass as tall as a man, made of rings of prisms that threw small \
rainbows on the ceiling whenever the sun came out. Nobody had cleaned it for years. She began with a bucket of warm \
water and a soft cloth, and it took her eleven days.

On the twelfth day the harbour master rowed out to see how she was getting on. He was a careful man who spoke \
slowly and never sat down before he was asked. He told her that the ships no longer needed the light, since every \
one of them carried a receiver that knew its position to within a few metres. "Then why do you want it lit?" she \
said. He thought about this for a while. "My father fished here," he answered at last. "When I was a boy I could \
see the beam from my bed. It went round every eight seconds. I have never slept as well since."

There is a simple reason why such a lamp can be seen so far away. A flame gives its light in all directions, and \
most of it is lost to the sky and to the ground. The prisms bend that lost light until it leaves in a flat sheet, \
level with the horizon. The same small flame that could barely light a kitchen can then be seen from a ship thirty \
kilometres out at sea. When the lens turns, the sheet becomes a few narrow beams, and each of them is brighter \
still. Engineers call this a gain, but nothing is gained: the light is only sent where somebody is looking.

Marta found the machine that turned the lens under a sheet of canvas. It worked like a clock. A weight of eighty \
kilograms hung on a chain inside the tower, and as it fell it drove a train of gears; every four hours somebody had \
to wind it up again. Three teeth of the second wheel were broken. She measured the wheel, wrote down the numbers in \
a notebook, and sent a letter to a foundry in the city. The answer came after two weeks. They could make the part, \
they wrote, but not before the autumn, and it would cost more than she earned in three months.

So she made it herself. She cut the teeth from a piece of brass that had been the nameplate of a ferry, and she \
filed them by hand in the evenings while the dog slept beside the stove. The first one was too thick and the second \
one too short. The third fitted. By the end of May the lens turned for the first time, without a sound, and the \
little rainbows went around the room one after the other like children on a carousel.

They lit the lamp on the longest day of the year, which was perhaps not the most sensible choice, because it did \
not get dark until eleven. The whole town stood on the pier with bread and cheese and a few bottles of wine. When \
the beam came over the water, nobody said anything. It crossed the boats, the old warehouses, the church and the \
hill behind it, and it went out to sea again. Eight seconds later it came back. The harbour master had brought his \
grandson, who had fallen asleep on his shoulder, and he did not wake him.
"""

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue? Answer in one sentence.",
    "Write one short sentence about the sea.",
)
