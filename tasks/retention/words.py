"""Words that answers are drawn from; none occurs in the generated filler (a test sees to it)."""

from __future__ import annotations

PEOPLE = (
    "Martha", "Tomas", "Elena", "Victor", "Nadia", "Oscar", "Priya", "Felix", "Ingrid", "Hassan",
    "Bianca", "Marcus", "Yuki", "Leonard", "Sofia", "Dmitri", "Amara", "Julian", "Greta", "Rafael",
    "Helena", "Samuel", "Clara", "Andre", "Monica", "Pablo", "Sarah", "Kevin", "Laura", "Robert",
    "Diana", "George",
)  # fmt: skip
NAMES = (
    "Max", "Lucy", "Charlie", "Bella", "Oliver", "Daisy", "Jack", "Molly", "Toby", "Ruby", "Leo", "Emma",
    "Sam", "Nina", "Hugo", "Alice", "Ben", "Maria", "Simon", "Julia", "Peter", "Anna", "David", "Rosa",
    "Frank", "Eva", "Henry", "Grace", "Louis", "Karen", "Adam", "Linda",
)  # fmt: skip
CITIES = (
    "Lisbon", "Oslo", "Cairo", "Lima", "Athens", "Dublin", "Madrid", "Vienna", "Warsaw", "Nairobi",
    "Tokyo", "Delhi", "Havana", "Boston", "Denver", "Seattle", "Toronto", "Sydney", "Berlin", "Prague",
    "Rome", "Paris", "Geneva", "Moscow", "Manila", "Bangkok", "Seoul", "Dallas", "Miami", "Chicago",
    "London", "Amsterdam", "Munich", "Milan", "Naples", "Lyon", "Zurich", "Istanbul", "Beirut", "Mumbai",
    "Shanghai", "Beijing", "Jakarta", "Hanoi", "Melbourne", "Auckland", "Montreal", "Houston", "Atlanta",
    "Phoenix", "Portland", "Bogota", "Santiago", "Lagos", "Accra", "Tunis", "Casablanca", "Budapest",
    "Bucharest", "Helsinki", "Stockholm", "Copenhagen", "Edinburgh", "Brussels",
)  # fmt: skip
FRUITS = (
    "mango", "cherry", "banana", "lemon", "melon", "papaya", "apricot", "coconut", "grape", "orange",
    "pineapple", "raspberry", "strawberry", "blueberry", "peach", "fig",
)  # fmt: skip
JOBS = (
    "lawyer", "plumber", "dentist", "surgeon", "pilot", "translator", "journalist", "mechanic", "chemist",
    "architect", "nurse", "accountant", "photographer", "electrician", "detective", "biologist",
)  # fmt: skip
ROOMS = (
    "attic", "cellar", "garage", "pantry", "bathroom", "bedroom", "basement", "closet", "hallway", "office",
    "library", "laundry", "nursery", "lobby", "studio", "workshop",
)  # fmt: skip
NOUNS = (
    "copper", "maple", "window", "planet", "guitar", "pepper", "rocket", "silver", "marble", "camera",
    "pencil", "tunnel", "engine", "butter", "dragon", "helmet", "island", "jacket", "kitten", "magnet",
    "needle", "pirate", "pocket", "ribbon", "saddle", "shovel", "sponge", "thunder", "ticket", "velvet",
    "violin", "wallet", "zebra", "anchor", "bucket", "carpet", "diamond", "falcon", "ginger", "hammer",
    "jungle", "lizard", "mirror", "napkin", "parrot", "puzzle", "salmon", "turkey", "walnut", "yogurt",
    "cactus", "cotton", "desert", "coffee", "garlic", "honey", "lettuce", "monkey", "oyster", "tomato",
    "panda", "robot", "sugar", "tiger",
)  # fmt: skip
