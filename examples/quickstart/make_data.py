"""Write the data of the quickstart: orders in plain English, and the JSON that they mean.

    python examples/quickstart/make_data.py

The training and the held-out sentences share numbers and weekdays alone: every sentence pattern, name, product and
city belongs to one side, and some numbers are only ever held out. What is measured is therefore whether the model
has learnt the task, not whether it remembers sentences.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent / "data"
SYSTEM = "Write the order as JSON with name, count, city and day (mon to sun), null if not said."
FIELDS = ("name", "count", "city", "day")  # what is ordered is said, and has to be left out
DAYS = {day: day[:3].lower() for day in "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()}
ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
ONES += "seventeen eighteen nineteen".split()
TENS = dict(zip(range(20, 100, 10), "twenty thirty forty fifty sixty seventy eighty ninety".split(), strict=True))
# Numbers that the training sentences never say.
UNSEEN_NUMBERS = frozenset({16, 23, 34, 37, 42, 48, 55, 59, 61, 66, 72, 77, 85, 88, 94, 99})

TRAIN = {
    "patterns": """
        {name} in {city} wants {count} {item} by {day}.
        {name} from {city} ordered {count} {item} for {day}.
        Please send {count} {item} to {name} in {city} on {day}.
        On {day}, deliver {count} {item} to {name} in {city}.
        Can you get {count} {item} to {city} by {day}? They are for {name}.
        The {city} shop needs {count} {item} on {day}; ask for {name}.
        Hi, this is {name}. I would like {count} {item} in {city} on {day}.
        My name is {name} and I need {count} {item} sent to {city} before {day}.
        {day}: {count} {item} for {name}, {city}.
        {city}, {day}: {name} takes {count} {item}.
        Order from {name}: {count} {item}, to arrive in {city} on {day}.
        It is {name} again, and this time we need {count} {item} in {city} by {day}.
        We promised {name} that {count} {item} would be in {city} on {day}.
        Could {name} have {count} {item} by {day}? The address is in {city}.
        {count} {item}, please, for {name} in {city}, and not later than {day}.
        Put {name} down for {count} {item}; the van goes to {city} on {day}.
        {name} called from {city} and asked for {count} {item} on {day}.
        A customer in {city} called {name} wants {count} {item} on {day}.
        I spoke with {name} about {count} {item}. Ship them to {city} on {day}.
        For {day} we still owe {name} in {city} {count} {item}.
        {name} would be happy with {count} {item} if they reach {city} by {day}.
        Send the {count} {item} that {name} paid for to {city} on {day}.
        Next {day} {name} opens a store in {city} and needs {count} {item}.
        Tell the driver: {count} {item}, {city}, {day}, and {name} will sign.
        {name} wants {count} {item} by {day}.
        Please reserve {count} {item} for {name} until {day}.
        {name} will collect {count} {item} on {day}.
        On {day} {name} needs {count} {item}.
        Hello, {name} here, I need {count} {item} on {day}.
        {name} in {city} wants {count} {item}.
        Please send {count} {item} to {name} in {city}.
        Ship {count} {item} to {city} for {name}.
        {name} lives in {city} and ordered {count} {item}.
        {name} has moved to {city} and would like {count} {item}.
        Someone in {city} wants {count} {item} on {day}.
        Deliver {count} {item} to {city} by {day}.
        {count} {item} have to be in {city} on {day}.
        {city} asked for {count} {item} on {day}.
        An order came in from {city}: {count} {item} by {day}.
        We had a call from {city} about {count} {item}, due on {day}.
        The people in {city} are waiting for {count} {item}; they come on {day}.
        {name} wants {count} {item}.
        {name} ordered {count} {item} again.
        Please put {count} {item} aside for {name}.
        {count} {item} for {name}, please.
        {city} needs {count} {item}.
        We need {count} {item} by {day}.
    """,
    "names": """
        Anna Boris Clara David Emma Felix Grace Henry Irene Jakob Karen Louis Maria Nadia Oscar Paula Quinn
        Robert Sarah Thomas Ursula Victor Wendy Yusuf Zoe Amir Bella Carlos Diana Erik Fatima George Hannah Ivan
        Julia Kenji Laura Mateo Nina Omar Petra Rosa Simon Tanya Umar Vera Walter Ximena Yara Zack Abigail Bernard
        Chloe Dimitri Esther Fiona Gustav Helena Ingrid Jasper Klara Leopold Miriam Niklas Ophelia Pascal Raphael
        Svetlana Tobias Viktoria Winston Aisha Benedict Camille Dorothea Emilio Francesca Giovanni Hiroshi Ismail
        Josephine Konrad Lucia Magdalena Nathaniel Olga Patricia Rodrigo Sophie Timothy Valentina Wolfgang Amelie
        Bartholomew Charlotte Dominic Evangeline Frederick Genevieve Harriet
    """,
    "adjectives": """
        red paper office wool steel glass coffee desk garden rubber kitchen cotton phone wooden picture bath plastic
        silver leather soup wall tennis winter door yellow golden marble striped folding electric square wireless
        tiny giant velvet ceramic bamboo summer travel music spare antique heavy pocket orange purple crystal canvas
        linen corner ocean baby engine birthday wedding painted polished
    """,
    "things": """
        pencils cups chairs blankets bolts jars mugs lamps hoses boots knives shirts tyres cases spoons frames towels
        boxes rings belts bowls clocks balls coats handles batteries umbrellas notebooks candles pillows keyboards
        hammers ladders tents mirrors brushes buckets carpets sofas drums violins napkins statues lanterns jackets
        bracelets magnets envelopes tractors helmets puzzles barrels whistles curtains teapots printers telescopes
        sandals necklaces radios
    """,
    "cities": """
        Berlin, Paris, Madrid, Rome, Vienna, Oslo, Dublin, Lisbon, Athens, Warsaw, Prague, Budapest, Helsinki,
        Brussels, London, Chicago, Boston, Seattle, Denver, Toronto, Montreal, Sydney, Tokyo, Osaka, Delhi,
        Mumbai, Cairo, Nairobi, Lima, Bogota, New York, San Diego, Hong Kong, Cape Town, Tel Aviv, Los Angeles,
        Stockholm, Copenhagen, Rotterdam, Antwerp, Marseille, Toulouse, Bordeaux, Valencia, Seville, Bilbao, Naples,
        Turin, Bologna, Florence, Salzburg, Innsbruck, Leipzig, Dresden, Stuttgart, Cologne, Gdansk, Bratislava,
        Ljubljana, Zagreb, Belgrade, Sofia, Bucharest, Istanbul, Ankara, Tbilisi, Beirut, Casablanca, Tunis, Lagos,
        Kampala, Johannesburg, Durban, Bangkok, Manila, Jakarta, Singapore, Shanghai, Beijing, Nagoya, Sapporo,
        Brisbane, Adelaide, Auckland, Wellington, Honolulu, Anchorage, Portland, Sacramento, Albuquerque, Nashville,
        Memphis, Baltimore, Pittsburgh, Cleveland, Detroit, Milwaukee, Ottawa, Calgary, Winnipeg, Guadalajara,
        Monterrey, Havana, Caracas, Quito, Montevideo, Recife, Salvador, San Antonio, Rio de Janeiro, Saint Paul,
        Santa Barbara, Kuala Lumpur, Addis Ababa, Den Haag, Port Louis
    """,
}
HELD_OUT = {
    "patterns": """
        This is an order by {name}: bring {count} {item} to {city} on {day}.
        By {day}, {name} in {city} has to receive {count} {item}.
        {name} needs our help with {count} {item}, which should get to {city} on {day}.
        Good morning, {name} speaking, please bring {count} {item} to {city} this {day}.
        We are to take {count} {item} to {city} on {day}, where {name} waits.
        The truck leaves for {city} on {day} with {count} {item} for {name}.
        Do not forget that {name} expects {count} {item} in {city} on {day}.
        Could you bring {name} {count} {item}? The office in {city} opens on {day}.
        New order for {day}, placed in {city} by {name}: {count} {item}.
        {name} just bought {count} {item} and asks for delivery on {day}.
        Keep {count} {item} for {name}, who comes by on {day}.
        {name} runs a hotel in {city} and is short of {count} {item}.
        Pack {count} {item} for our friend {name} in {city}.
        There is a request from {city}: {count} {item} on {day}.
        {name} asked whether we have {count} {item}.
    """,
    "names": """
        Alice Bruno Cecilia Daniel Elena Frank Gloria Hugo Isabel James Katrin Leon Monica Nora Oliver Priya
        Rachel Stefan Teresa Ulrich Violet William Yasmin Zara
    """,
    "items": """
        blue pens, tea pots, rocking horses, silk scarves, copper pipes, flower pots, oil heaters, water
        bottles, school bags, dinner plates, camping stoves, baseball caps, running shoes, guitar strings, table
        cloths, backpacks, scissors, shovels, blenders, cushions
    """,
    "cities": """
        Hamburg, Lyon, Milan, Zurich, Geneva, Porto, Krakow, Riga, Glasgow, Munich, Houston, Dallas, Phoenix,
        Vancouver, Melbourne, Kyoto, Santiago, Accra, Las Vegas, Buenos Aires
    """,
}


def in_words(number: int) -> str:
    """``42`` -> ``"forty-two"``."""
    if number < 20:
        return ONES[number]
    return TENS[number // 10 * 10] + (f"-{ONES[number % 10]}" if number % 10 else "")


def phrases(text: str) -> list[str]:
    """What stands between the commas."""
    return [" ".join(part.split()) for part in text.split(",")]


def combined(adjectives: list[str], things: list[str]) -> list[str]:
    """Every thing by itself and with every adjective: too many to remember, so that copying is what pays."""
    return [f"{adjective} {thing}" for adjective in adjectives for thing in things] + things * 6


def examples(side: dict[str, str], numbers: list[int], count: int, rng: random.Random) -> Iterator[tuple[str, str]]:
    """``count`` different pairs of sentence and JSON; patterns take turns."""
    patterns = [line.strip() for line in side["patterns"].strip().splitlines()]
    names = side["names"].split()
    cities = phrases(side["cities"])
    items = phrases(side["items"]) if "items" in side else combined(side["adjectives"].split(), side["things"].split())
    seen: set[str] = set()
    while len(seen) < count:
        pattern = patterns[len(seen) % len(patterns)]
        number, day = rng.choice(numbers), rng.choice(list(DAYS))
        said = {
            "name": rng.choice(names),
            "item": rng.choice(items),
            "count": in_words(number) if rng.random() < 0.7 else str(number),
            "city": rng.choice(cities),
            "day": day,
        }
        sentence = pattern.format(**said)
        sentence = sentence[0].upper() + sentence[1:]
        if sentence in seen:
            continue
        seen.add(sentence)
        meant = {**said, "count": number, "day": DAYS[day]}
        answer = {key: meant[key] if f"{{{key}}}" in pattern else None for key in FIELDS}
        yield sentence, json.dumps(answer, separators=(",", ":"))


def lines(side: dict[str, str], numbers: list[int], count: int, seed: int) -> str:
    """JSON lines of conversations, in random order."""
    rng = random.Random(seed)
    pairs = list(examples(side, numbers, count, rng))
    rng.shuffle(pairs)
    rows = (
        {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": sentence},
                {"role": "assistant", "content": answer},
            ]
        }
        for sentence, answer in pairs
    )
    return "".join(json.dumps(row) + "\n" for row in rows)


def files() -> dict[str, str]:
    """File name -> text."""
    everything = range(2, 100)
    return {
        "train.jsonl": lines(TRAIN, [n for n in everything if n not in UNSEEN_NUMBERS], 528, seed=1),
        "held_out.jsonl": lines(HELD_OUT, list(everything), 120, seed=2),
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text)
        print(f"{name}: {text.count(chr(10))} conversations")
