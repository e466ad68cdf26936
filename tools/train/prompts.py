#!/usr/bin/env python3
"""Prompts for simple texts: stories and questions in simple language, combined from lists.

  prompts.py --out PROMPTS.jsonl [-n 200000] [--seed 1]
  prompts.py --out PROMPTS.jsonl --paragraphs TEXT --ask "Summarize: " [-n 200000]

A small model (pair.py) needs many texts of few kinds. Each line is {"prompt": …} for generate.py. A question occurs up to
--most times, to be answered differently each time. The second form puts --ask before each paragraph of 60 to 1,500
characters of a text; paragraphs are separated by blank lines, or by lines of "%" as in collections of quotations.
"""
import argparse
import json
import os
import random
import re

WHO = ("boy girl cat dog rabbit bear fox bird frog mouse duck horse sheep cow lion owl turtle squirrel bee ant fish whale king queen "
       "prince princess farmer baker sailor teacher robot dragon giant witch fairy painter doctor gardener shepherd musician kitten "
       "puppy hen goat donkey elephant monkey penguin hedgehog snail butterfly mermaid knight miller fisherman grandmother grandfather").split()
HOW = ("little old brave shy happy sad kind lazy clever curious hungry sleepy proud lonely careful forgetful noisy quiet gentle "
       "greedy honest funny small tired young wise stubborn friendly clumsy patient").split()
DOES = ("finds a lost key|learns to swim|wants to see the sea|makes a new friend|helps a neighbour|loses a red hat|plants a seed|wins a race|"
        "is afraid of the dark|shares the last piece of bread|builds a boat|gets lost in the forest|finds a treasure|tells a lie|learns to say sorry|"
        "visits the moon|cannot sleep|bakes a cake|finds a tiny door|saves a village|learns to read|meets a stranger|climbs a mountain|"
        "keeps a secret|finds an egg|lives in a lighthouse|wants to fly|hears a strange sound|finds a map|forgets a birthday|catches a star|"
        "crosses a river|waits for the rain|paints a house|looks after a baby bird|loses a tooth|goes to school for the first time|"
        "finds a magic stone|writes a letter|misses the bus").split("|")
WHERE = ("in a small village|by the sea|in a big city|in the forest|on a farm|on a snowy mountain|in a castle|on an island|in a garden|by a river|"
         "in a quiet town|in the desert|under the ground|on a ship").split("|")
WITH = ("a wooden spoon|a red balloon|an umbrella|a blue bicycle|an old clock|a lamp|a basket of apples|a drum|a pair of shoes|a silver coin|"
        "a kite|a warm coat|a ladder|a jar of honey|a broken cup|a ball|a book without words|a lantern|a bell|a rope").split("|")
STORY = ("Tell me a simple story about a {how} {who} who {does}.", "Write a short story for children about a {how} {who} who {does}.",
         "Write a story about a {how} {who} {where}.", "Tell me a story about a {who} and {with_}.",
         "Tell me a short story about a {how} {who} who {does} {where}.", "Write a bedtime story about a {who} who {does}.",
         "Write a story in which a {how} {who} and a {how2} {who2} become friends.", "Write a short story about {with_}, a {who} and a {who2}.",
         "Once upon a time there was a {how} {who} who lived {where}. Continue the story.", "Write a short story with a happy end about a {how} {who}.")
THING = ("the sun|the moon|the sea|rain|snow|wind|fire|a river|a mountain|a forest|a tree|a flower|grass|an apple|bread|milk|honey|salt|sugar|water|"
         "air|a cloud|a rainbow|thunder|winter|summer|spring|autumn|a cat|a dog|a horse|a bird|a bee|a spider|a fish|a whale|an elephant|a lion|"
         "a house|a bridge|a road|a ship|a train|a car|a bicycle|an aeroplane|a clock|a lamp|a mirror|a book|a pencil|paper|a map|money|music|a song|"
         "a drum|a piano|a game|a ball|a school|a teacher|a farm|a farmer|a baker|a doctor|a city|a village|a market|a garden|a kitchen|soup|cheese|"
         "an egg|rice|a potato|tea|coffee|sleep|a dream|a smile|a friend|a family|a birthday|a holiday|the heart|the brain|bones|teeth|eyes|ears|"
         "light|sound|colour|heat|ice|steam|stone|sand|gold|iron|wood|glass|wool|cotton|a computer|a telephone|a camera|the internet|a robot|a star|"
         "a planet|gravity|magnetism|electricity|time|a year|a month|a number|a circle|a triangle|language|a word|a letter").split("|")
ASK = ("What is {t}?", "Explain {t} to a child.", "Tell me about {t}.", "Describe {t} in a few simple sentences.", "Why is {t} important?",
       "What do people use {t} for?", "Write three short sentences about {t}.", "Where can you find {t}?", "What would the world be like without {t}?",
       "Give me five facts about {t}.", "Write a short poem about {t}.")
WHY = ("the sky is blue|leaves fall in autumn|we sleep|birds fly south|the sea is salty|bread rises|ice floats|cats purr|we have seasons|"
       "it rains|the moon changes its shape|we laugh|dogs bark|plants need light|we get hungry|metal rusts|boats float|stars twinkle|bees make honey|"
       "we need friends|it is good to read|people sing|children play|it is important to be honest|we should drink water|exercise is good").split("|")
HOWTO = ("make a cup of tea|plant a tree|bake bread|learn a new language|make a friend|ride a bicycle|clean a room|cook rice|draw a cat|write a letter|"
         "sleep better|save money|take care of a dog|learn to swim|read more books|stay healthy|be kind|grow tomatoes|make a paper boat|say sorry|"
         "wash the dishes|study for a test|tell a good story|make soup|pack a bag|fix a bicycle|feel less afraid|thank a teacher").split("|")
DO = ("Explain why {why}.", "Why is it that {why}? Answer in plain English.", "How do I {howto}?", "Give me some tips: how to {howto}.",
      "Write a short list of steps to {howto}.", "What should I do if I want to {howto}?")


def one(rng):
    kind = rng.random()
    pick = lambda words: rng.choice(words)
    if kind < 0.6:
        return pick(STORY).format(who=pick(WHO), who2=pick(WHO), how=pick(HOW), how2=pick(HOW), does=pick(DOES), where=pick(WHERE), with_=pick(WITH))
    if kind < 0.85:
        return pick(ASK).format(t=pick(THING), t2=pick(THING))
    return pick(DO).format(why=pick(WHY), howto=pick(HOWTO))


def paragraphs(path, ask):
    """Yields a prompt for each paragraph of prose, without tables and drawings."""
    for text in re.split(r"\n[ \t]*%?[ \t]*\n", open(path, encoding="utf-8", errors="replace").read()):
        text = " ".join(text.split())
        if 60 <= len(text) <= 1500 and sum(c.isalpha() or c == " " for c in text) > 0.9 * len(text):
            yield ask + text


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", required=True)
    p.add_argument("-n", type=int, default=200000)
    p.add_argument("--most", type=int, default=40)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--paragraphs")
    p.add_argument("--ask", default="Summarize: ")
    args = p.parse_args()
    rng, seen, lines, drawn = random.Random(args.seed), {}, [], 0
    if args.paragraphs:
        lines = sorted(set(paragraphs(args.paragraphs, args.ask)))
        rng.shuffle(lines)
        seen = lines = lines[:args.n]
    while not args.paragraphs and len(lines) < args.n and drawn < 8 * args.n:
        text = one(rng).replace("a old", "an old").replace("a honest", "an honest").replace("a ant", "an ant").replace("a owl", "an owl") \
            .replace("a elephant", "an elephant")
        seen[text] = seen.get(text, 0) + 1
        if seen[text] <= args.most:
            lines.append(text)
        drawn += 1
    with open(args.out + ".part", "w", encoding="utf-8") as f:
        for text in lines:
            f.write(json.dumps({"prompt": text}) + "\n")
    os.replace(args.out + ".part", args.out)
    print(f"{args.out}: {len(lines)} prompts, {len(seen)} of them different")


if __name__ == "__main__":
    main()
