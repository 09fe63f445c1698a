# SPDX-License-Identifier: Apache-2.0
"""Textbook Python functions on numbers, strings, lists and dicts, with varied names and
constants."""

from __future__ import annotations

import random
import textwrap

from specla.train.function import Function

# name | arguments | what it does | body. $n, $t, $l and $k stand for names and a constant.
CLASSICS = """
is_even | $n | return True if $n is even | return $n % 2 == 0
is_odd | $n | return True if $n is odd | return $n % 2 == 1
is_divisible | $n, d | return True if $n is divisible by d | return $n % d == 0
factorial | $n | return the factorial of $n | result = 1;for i in range(2, $n + 1):;    result *= i;return result
factorial | $n | return the factorial of $n using recursion | if $n <= 1:;    return 1;return $n * factorial($n - 1)
fibonacci | $n | return the $n-th Fibonacci number | a, b = 0, 1;for _ in range($n):;    a, b = b, a + b;return a
fibonacci_list | $n | return the first $n Fibonacci numbers | result = [];a, b = 0, 1;for _ in range($n):;    result.append(a);    a, b = b, a + b;return result
gcd | a, b | return the greatest common divisor of a and b | while b:;    a, b = b, a % b;return a
is_prime | $n | return True if $n is a prime number | if $n < 2:;    return False;for i in range(2, int($n ** 0.5) + 1):;    if $n % i == 0:;        return False;return True
primes_up_to | $n | return a list of the prime numbers up to $n | primes = [];for i in range(2, $n + 1):;    if all(i % p != 0 for p in primes):;        primes.append(i);return primes
sum_of_digits | $n | return the sum of the digits of $n | return sum(int(c) for c in str(abs($n)))
count_digits | $n | return the number of digits of $n | return len(str(abs($n)))
reverse_number | $n | return $n with its digits reversed | return int(str($n)[::-1])
power | base, exponent | return base raised to the power of exponent | result = 1;for _ in range(exponent):;    result *= base;return result
clamp | $n, low, high | limit $n to the range from low to high | return max(low, min(high, $n))
absolute_value | $n | return the absolute value of $n | return -$n if $n < 0 else $n
add | a, b | return the sum of a and b | return a + b
multiply | a, b | return the product of a and b | return a * b
divide | a, b | return a divided by b, or None if b is zero | if b == 0:;    return None;return a / b
maximum | a, b | return the larger of a and b | return a if a > b else b
max_of_three | a, b, c | return the largest of a, b and c | return max(a, b, c)
celsius_to_fahrenheit | celsius | convert a temperature from Celsius to Fahrenheit | return celsius * 9 / 5 + 32
fahrenheit_to_celsius | fahrenheit | convert a temperature from Fahrenheit to Celsius | return (fahrenheit - 32) * 5 / 9
circle_area | radius | return the area of a circle | return 3.14159 * radius ** 2
rectangle_area | width, height | return the area of a rectangle | return width * height
rectangle_perimeter | width, height | return the perimeter of a rectangle | return 2 * (width + height)
is_leap_year | year | return True if year is a leap year | return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
collatz_steps | $n | return the number of Collatz steps from $n to 1 | steps = 0;while $n != 1:;    $n = $n // 2 if $n % 2 == 0 else 3 * $n + 1;    steps += 1;return steps
divisors | $n | return a list of the divisors of $n | return [i for i in range(1, $n + 1) if $n % i == 0]
sum_to | $n | return the sum of the numbers from 1 to $n | return $n * ($n + 1) // 2
multiplication_table | $n | return the first $k multiples of $n | return [$n * i for i in range(1, $k + 1)]
add_constant | $n | return $n plus $k | return $n + $k
times_constant | $n | return $n times $k | return $n * $k
reverse_string | $t | return $t reversed | return $t[::-1]
is_palindrome | $t | return True if $t is a palindrome | return $t == $t[::-1]
is_palindrome | $t | return True if $t reads the same backwards, ignoring case | $t = $t.lower();return $t == $t[::-1]
count_vowels | $t | return the number of vowels in $t | return sum(1 for c in $t.lower() if c in "aeiou")
count_vowels | $t | count the vowels in $t | count = 0;for char in $t.lower():;    if char in "aeiou":;        count += 1;return count
remove_vowels | $t | return $t without its vowels | return "".join(c for c in $t if c.lower() not in "aeiou")
count_words | $t | return the number of words in $t | return len($t.split())
count_letter | $t, letter | return how often letter occurs in $t | return $t.count(letter)
longest_word | $t | return the longest word in $t | return max($t.split(), key=len)
shortest_word | $t | return the shortest word in $t | return min($t.split(), key=len)
reverse_words | $t | return $t with its words in reverse order | return " ".join(reversed($t.split()))
capitalize_words | $t | return $t with every word capitalized | return " ".join(word.capitalize() for word in $t.split())
to_upper | $t | return $t in upper case | return $t.upper()
first_letters | $t | return the first letter of every word in $t | return [word[0] for word in $t.split()]
word_lengths | $t | return a list of the lengths of the words in $t | return [len(word) for word in $t.split()]
remove_spaces | $t | return $t without spaces | return $t.replace(" ", "")
starts_with | $t, prefix | return True if $t starts with prefix | return $t.startswith(prefix)
repeat_string | $t, times | return $t repeated a number of times | return $t * times
is_anagram | a, b | return True if a and b are anagrams | return sorted(a.lower()) == sorted(b.lower())
count_uppercase | $t | return the number of upper case letters in $t | return sum(1 for c in $t if c.isupper())
keep_digits | $t | return only the digits of $t | return "".join(c for c in $t if c.isdigit())
count_characters | $t | return a dict of how often each character occurs in $t | counts = {};for char in $t:;    counts[char] = counts.get(char, 0) + 1;return counts
word_frequencies | $t | return a dict of how often each word occurs in $t | counts = {};for word in $t.split():;    counts[word] = counts.get(word, 0) + 1;return counts
first_element | $l | return the first element of $l, or None if it is empty | return $l[0] if $l else None
last_element | $l | return the last element of $l, or None if it is empty | return $l[-1] if $l else None
first_elements | $l | return the first $k elements of $l | return $l[:$k]
last_elements | $l | return the last $k elements of $l | return $l[-$k:]
every_nth | $l | return every $k-th element of $l | return $l[::$k]
reverse_list | $l | return $l in reverse order | return $l[::-1]
sort_descending | $l | return $l sorted from largest to smallest | return sorted($l, reverse=True)
sort_ascending | $l | return $l sorted from smallest to largest | return sorted($l)
sort_by_length | $l | return the strings of $l sorted by length | return sorted($l, key=len)
remove_duplicates | $l | return $l without duplicates, in order | seen = set();result = [];for item in $l:;    if item not in seen:;        seen.add(item);        result.append(item);return result
unique_count | $l | return the number of distinct elements in $l | return len(set($l))
count_occurrences | $l, item | return how often item occurs in $l | return sum(1 for x in $l if x == item)
index_of | $l, item | return the index of item in $l, or -1 if it is missing | for i, x in enumerate($l):;    if x == item:;        return i;return -1
find_maximum | $l | return the largest element of $l without using max | best = $l[0];for x in $l[1:]:;    if x > best:;        best = x;return best
find_minimum | $l | return the smallest element of $l without using min | best = $l[0];for x in $l[1:]:;    if x < best:;        best = x;return best
second_largest | $l | return the second largest element of $l | return sorted(set($l))[-2]
average | $l | return the average of $l | return sum($l) / len($l)
median | $l | return the median of $l | ordered = sorted($l);middle = len(ordered) // 2;if len(ordered) % 2:;    return ordered[middle];return (ordered[middle - 1] + ordered[middle]) / 2
running_total | $l | return the running totals of $l | result = [];total = 0;for x in $l:;    total += x;    result.append(total);return result
differences | $l | return the differences between neighbors in $l | return [b - a for a, b in zip($l, $l[1:])]
flatten | $l | flatten a list of lists | return [item for inner in $l for item in inner]
chunks | $l, size | split $l into pieces of the given size | return [$l[i:i + size] for i in range(0, len($l), size)]
rotate_left | $l, k | rotate $l to the left by k places | k = k % len($l);return $l[k:] + $l[:k]
common_elements | a, b | return the elements that a and b have in common | return [x for x in a if x in b]
merge_sorted | a, b | merge two lists into one sorted list | return sorted(a + b)
is_sorted | $l | return True if $l is sorted | return all(a <= b for a, b in zip($l, $l[1:]))
contains | $l, item | return True if item is in $l | return item in $l
swap_ends | $l | return $l with its first and last element swapped | $l = list($l);$l[0], $l[-1] = $l[-1], $l[0];return $l
dot_product | a, b | return the dot product of a and b | return sum(x * y for x, y in zip(a, b))
binary_search | $l, target | return the index of target in the sorted list $l, or -1 | low, high = 0, len($l) - 1;while low <= high:;    middle = (low + high) // 2;    if $l[middle] == target:;        return middle;    if $l[middle] < target:;        low = middle + 1;    else:;        high = middle - 1;return -1
bubble_sort | $l | sort $l with bubble sort | $l = list($l);for i in range(len($l)):;    for j in range(len($l) - 1 - i):;        if $l[j] > $l[j + 1]:;            $l[j], $l[j + 1] = $l[j + 1], $l[j];return $l
transpose | matrix | return the transpose of matrix | return [list(row) for row in zip(*matrix)]
invert_dict | d | return a dict with the keys and values of d swapped | return {value: key for key, value in d.items()}
merge_dicts | a, b | return a new dict with the entries of a and b | result = dict(a);result.update(b);return result
sorted_keys | d | return the keys of d in sorted order | return sorted(d)
sum_values | d | return the sum of the values of d | return sum(d.values())
key_of_maximum | d | return the key of d with the largest value | return max(d, key=d.get)
filter_by_value | d, limit | return the entries of d whose value is above limit | return {key: value for key, value in d.items() if value > limit}
group_by_length | $l | group the words of $l by their length in a dict | groups = {};for word in $l:;    groups.setdefault(len(word), []).append(word);return groups
words_longer_than | $l | return the words of $l longer than $k characters | return [word for word in $l if len(word) > $k]
join_words | $l | join the words of $l with commas | return ", ".join($l)
read_lines | path | return the lines of the file at path | with open(path) as file:;    return [line.rstrip() for line in file]
count_lines | path | return the number of lines of the file at path | with open(path) as file:;    return sum(1 for _ in file)
load_json | path | load the JSON file at path | import json;with open(path) as file:;    return json.load(file)
fizz_buzz | $n | return a list of the FizzBuzz words from 1 to $n | result = [];for i in range(1, $n + 1):;    if i % 15 == 0:;        result.append("FizzBuzz");    elif i % 3 == 0:;        result.append("Fizz");    elif i % 5 == 0:;        result.append("Buzz");    else:;        result.append(str(i));return result
"""  # noqa: E501


def parse(table: str) -> list[list[str]]:
    """The rows of `CLASSICS` as [name, arguments, does, body]."""
    return [line.split(" | ", 3) for line in table.strip().splitlines()]


ROWS = parse(CLASSICS)


def classic_function(rng: random.Random) -> Function:
    """One row with its placeholders filled in."""
    drawn = {
        "$n": rng.choice(("n", "number", "value", "x", "num")),
        "$t": rng.choice(("text", "s", "string", "sentence", "word")),
        "$l": rng.choice(("items", "numbers", "values", "lst", "data", "elements")),
        "$k": str(rng.randint(2, 12)),
    }
    name, args, does, body = (fill(part, drawn) for part in rng.choice(ROWS))
    body = textwrap.indent(body.replace(";", "\n") + "\n", "    ")
    return Function(name, f"{name}({args})", does, body)


def fill(text: str, drawn: dict[str, str]) -> str:
    """Replaces the placeholders of a row."""
    for key, value in drawn.items():
        text = text.replace(key, value)
    return text
