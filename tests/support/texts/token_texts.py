"""Texts that tell tokenizers apart: many scripts, emoji, white space, code; and random mixtures of them."""

import random
from collections.abc import Iterator, Sequence

SENTENCES = (
    "The quick brown fox jumps over the lazy dog. It's 3.14159, they're 1,234,567 km away; we'll see.",
    "I'M SURE YOU'LL SAY THEY'D'VE GONE, I'Ve 'tIs 'S 't'T 'rE 'Re 'VE 'lL '",
    "Fünf größere Äpfel kosten 12,50 € – naïve façade, coöperate, Œuvre, ß ẞ ſ ﬁ ﬂ ĳ",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. Zażółć gęślą jaźń. Ő ű ğ ı İ Ø Å þ ð",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Їжак ґава ўсё Ѹ҂",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. ἐν ἀρχῇ ἦν ὁ λόγος ᾧ ῼ",
    "Բարեւ աշխարհ։ Ինչպե՞ս ես։ გამარჯობა მსოფლიო ჴ ⴀⴁ Ა",
    "שָׁלוֹם עוֹלָם! מה נשמע? ״ציטוט״ 123",
    "السَّلامُ عَلَيْكُم ١٢٣٤٥ لا إله ﷺ ۱۲۳ گچپژ ـــ",
    "नमस्ते दुनिया, क्षत्रिय ज्ञान १२३ हिन्दी । বাংলা ভাষা ১২৩ ੴ ਪੰਜਾਬੀ ગુજરાતી ଓଡ଼ିଆ",
    "தமிழ் மொழி ௧௨௩ తెలుగు ౧౨౩ ಕನ್ನಡ ೧೨೩ മലയാളം ൧൨൩ සිංහල ",
    "สวัสดีชาวโลก ๑๒๓ ราคา ๕๐ บาท ພາສາລາວ ໑໒໓ ភាសាខ្មែរ ១២៣ မြန်မာဘာသာ ၁၂၃",
    "བོད་སྐད་ ༡༢༣ ᠮᠣᠩᠭᠣᠯ ᠠᠶᠢᠯ አማርኛ ፩፪፫ ᎣᏏᏲ ꮳꮃꭹ ᓄᓇᕗᑦ ᚠᚢᚦ ᚛ᚑᚌᚐᚋ᚜ ⵣⵉⵖ",
    "我能吞下玻璃而不伤身体。繁體中文測試，「引號」『書名』——第１２３章　全角空格",
    "私はガラスを食べられます。ｶﾀｶﾅ ひらがな ヴ ゟ ヿ 々〆ヵヶ ㈱ ㍿ １２３",
    "안녕하세요 세계! 한국어 ㄱㄴㄷ ㅏㅑ 각 각 ㉠",
    "𠀀𠀁𪚥𫝀𬺰𮯠 𝒜𝓑𝔠𝕯 𝟘𝟙𝟚 𐌰𐌱 𒀀𒀁 𓀀𓀁 𞤀𞤁 🄰🅰 𐎠 𑀀𑁒",
    "👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 ❤️ ☎︎ 1️⃣ #️⃣ 🤷🏿‍♀️ 😀😃😄 ©️ ™ 🫠 🪿",
    "e\u0301 o\u0308\u0304 Z\u0351\u036b\u0343a\u030al\u0328g\u0489o \u0300\u0301 \u20dd \u0e48\u0e31",
    "½ ¼ ⅞ ² ³ ⁴ ₅ Ⅳ ⅻ ① ⑳ ㊿ ٣ ߁ ߂ ꘠ 𑄶 𞥐 ㆒ 〇 壹 〡",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α∧¬β, ∑ᵢ xᵢ² ≤ √∞ ± ≠ ÷ × ° № § ¶ † ‡ ‰ ′ ″ ‹› «» „“ ‚‘ … ‥ ⁇",
    "$100 €5 £3 ¥7 ₹9 ¢ ¤ ^_^ `code` ~tilde~ |pipe| a+b=c <b>x</b> &amp; @user #tag 50% \\n /path/to_file",
    "tabs\tand\t\tmore\t\n\n\n  indented\n    four\n\t mixed \r\n\r\nCRLF\r\rCR",
    "vertical \v\f tabs\x85next\u2028line\u2029para",
    "a\u00a0b\u00a0\u00a0c\u1680d\u2000e\u2003\u2003f\u2009g\u200ah\u202fi\u205fj\u3000\u3000k \u00a0 \u3000 l",
    "zero\u200bwidth\u200c\u200d\u2060\ufeff soft\u00adhyphen \u061c\u200e\u200f\u202a\u202e\u202c\u2066\u2069 end",
    "NUL\x00\x00 bell\x07 esc\x1b[31m del\x7f \x01\x02\x1c\x1d\x1e\x1f \x80\x9f",
    "\ufffd \ufffe \uffff \U0001ffff \U0010ffff",
    "\ue000\uf8ff private \U000f0000 \U00100000 unassigned \u0378 \u05ff",
    "\U0001fb00 tags \U000e0041\U000e007f \ufe0f\U000e0100",
    "   leading and trailing   ",
    " ",
    "",
    "\n",
    "\u2581already\u2581spaced\u2581\u2581twice \u2581 x\u2581",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "--------------------------------------------------------------- ====================== ......!!!!!!???????",
    "                                                                                                            x",
    "\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\t\t\t\t\t\t\t\t\t\t\t\t\t\t",
    "12345678901234567890 1 12 123 1234 0x1F 1e-10 3.0f 1_000 १२३४५६७ ٤٥٦٧٨ 1²2³ ½½½½",
    "<0x0A> <0x41> <0xff> [UNK] [EMPTY_3] Ġhello ĊĊ âĢĻ Ã© ▁the",
)

CODE = (
    "def f(x: int) -> str:\n    '''Doc.'''\n    return f\"{x!r:>{10}}\"  # don't\n\n\nclass A(B):\n\tpass\n",
    '#include <stdio.h>\r\nint main(void) {\r\n\tprintf("%d\\n", 1 << 3 & ~0xFFu);\r\n\treturn 0; /* ok */\r\n}\r\n',
    "const f = async (a, ...b) => { await Promise.all(b.map(x => x?.y ?? `t${a}`)); }; // it's\n",
    'fn main() { let mut v: Vec<&\'static str> = vec!["a"]; match v.pop() { Some(s) => x!("{s}"), None => () } }\n',
    "SELECT t.\"név\", COUNT(*) FROM [dbo].t WHERE x <> 'O''Brien' AND y >= 1.5e3 GROUP BY 1; -- comment\n",
    '<html lang="en"><body><h1>Title</h1><ul><li>a</li></ul><br/><!-- x --></body></html>\n',
    "\\begin{equation}\n  \\frac{1}{2}\\sum_{i=0}^{\\infty} x_i \\tag{1}\n\\end{equation}\n",
    '{"key": [1, 2.5, null, true, "\\u00e9\\n"], "nested": {"a": {}}}\n',
    "for i in $(seq 1 10); do echo \"${i}\" | awk '{print $1}' >> out.txt 2>&1; done\n",
    "| a | b |\n|---|:-:|\n| **x** | `y` |\n\n- [ ] todo\n1. one\n> quote\n\n```py\nx\n```\n",
)

_LETTERS = (
    "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456789 !#$%&()*+,-./:;<=>?@[\\]^_{|}~ "
    "äöüßéèñçøåœğıİſẞ абвгдежзиёїАБВ αβγδωΑΩάῇ אבגדשׁ ابتثجحًّ١٢٣۴ कखगघािीु्१२ กขคงัิี่๑๒ 一二三中文漢字体 "
    "あいうアイウーｱ 한국어가각ㄱ 👍🏽👨‍👩‍👧🏳️🌈❤️🇩🇪 ½²³₅Ⅳ①٣߁ ∀∈ℝ√∞≠÷×°№§€£¥₹ 𝒜𝟘𐌰𠀀𪚥🄰 sStTdDmMlLrRvVeE'"
).split()
_SIGNS = (
    " | \t\n\r| \n|'\"`´’|\u0300\u0301\u0308\u0327\u20dd|\u00a0\u1680\u2000\u2003\u2028\u202f\u3000\x85|"
    "\u200b\u200c\u200d\u2060\ufeff\u00ad|\x00\x01\x07\x1b\x1c\x1f\x7f\x80|\u2581Ġ"
).split("|")
_ALPHABETS = (*_LETTERS, *_SIGNS)
# Random code points come from all planes, most often from those that have characters.
_RANGES = ((0, 0x800), (0x800, 0xD800), (0xE000, 0x10000), (0x10000, 0x20000), (0x20000, 0x40000), (0x40000, 0x110000))
_WEIGHTS = (8, 8, 4, 6, 4, 2)


def written() -> list[str]:
    """Return the texts of the corpus: sentences, code, and all of them joined in several ways."""
    whole = [*SENTENCES, *CODE]
    return [*whole, "\n".join(whole), " ".join(whole), "".join(whole), "".join(reversed(whole))]


def spelled(texts: Sequence[str], special: Sequence[str]) -> Iterator[str]:
    """Yield the texts with special tokens spelled out before, after and within them."""
    for i, text in enumerate(texts):
        a, b = special[i % len(special)], special[(i * 7 + 1) % len(special)]
        middle = len(text) // 2
        yield f"{a}{text[:middle]}{b} {a}{text[middle:]}{b}{b[:-1]}{a[1:]}\n{b}"


def random_texts(n: int, special: Sequence[str], seed: int = 0) -> Iterator[str]:
    """Yield n random texts that mix alphabets, words, code points of all planes and special tokens."""
    rng = random.Random(seed)
    words = [word for text in (*SENTENCES, *CODE) for word in text.split(" ")]
    for _ in range(n):
        yield "".join(_chunk(rng, words, special) for _ in range(rng.randint(1, 8)))


def _chunk(rng: random.Random, words: Sequence[str], special: Sequence[str]) -> str:
    kind = rng.random()
    if kind < 0.5:
        return "".join(rng.choices(rng.choice(_ALPHABETS), k=rng.randint(1, 6)))
    if kind < 0.7:
        return rng.choice(words) + rng.choice(("", " ", "\n"))
    if kind < 0.8 and special:
        token = rng.choice(special)
        return token if rng.random() < 0.7 else token[: rng.randint(0, len(token))]
    if kind < 0.85:
        return rng.choice(" \n\t\r-=.#a0中") * rng.randint(1, 40)
    low, high = rng.choices(_RANGES, _WEIGHTS)[0]
    return "".join(chr(rng.randrange(low, high)) for _ in range(rng.randint(1, 4)))
