// Words of torchtext's basic_english: UTF-8 text to tokens, counted or encoded, without Python's global lock.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

using Byte = unsigned char;

// Words are followed by this many zeros, so that they are read eight bytes at a time.
constexpr uint64_t PADDING = 8;
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first of eight bytes is the lowest");
constexpr uint64_t ONES = 0x0101010101010101u, HIGH = 0x80 * ONES;

uint64_t eight(const Byte* bytes) {
    uint64_t value;
    memcpy(&value, bytes, 8);
    return value;
}

// Words with a value each, in the order of their first appearance: an open hash table.
struct Table {
    struct Word {
        uint64_t start, end, value;  // its first eight bytes; `end` in `bytes`, where the next word starts
    };
    std::vector<uint32_t> slots = std::vector<uint32_t>(1 << 12);  // numbers of words; 0: free
    std::vector<Word> words = {{0, 0, 0}};  // the first one is none, and its value that of unknown words
    std::vector<Byte> bytes;

    static uint64_t mixed(uint64_t value) {
        value *= 0x9E3779B97F4A7C15u;
        return value ^ value >> 32;
    }

    static uint64_t hashed(const Byte* word, uint32_t size) {
        uint64_t hash = mixed(eight(word) + size);
        for (uint32_t done = 8; done < size; done += 8) hash = mixed(hash ^ eight(word + done));
        return hash;
    }

    bool is(uint32_t number, const Byte* word, uint32_t size) const {
        const Word& found = words[number];
        const uint64_t begin = words[number - 1].end;
        return found.start == eight(word) && found.end - begin == size &&
               (size <= 8 || !memcmp(word + 8, &bytes[begin + 8], size - 8));
    }

    // The slot of the word, or the free one where it belongs.
    uint64_t find(const Byte* word, uint32_t size) const {
        const uint64_t mask = slots.size() - 1;
        // The highest bits of the product: lower ones do not depend on the last letters.
        uint64_t slot = hashed(word, size) >> (__builtin_clzll(slots.size()) + 1);
        while (slots[slot] && !is(slots[slot], word, size)) slot = (slot + 1) & mask;
        return slot;
    }

    uint64_t value(const Byte* word, uint32_t size) const { return words[slots[find(word, size)]].value; }

    // The number of the word, which is added if it is new.
    uint32_t number(const Byte* word, uint32_t size) {
        const uint64_t slot = find(word, size);
        return slots[slot] ? slots[slot] : added(word, size, slot);
    }

    uint32_t added(const Byte* word, uint32_t size, uint64_t slot) {
        slots[slot] = static_cast<uint32_t>(words.size());
        bytes.insert(bytes.end(), word, word + size);
        words.push_back({eight(word), bytes.size(), 0});
        if (2 * words.size() > slots.size()) grow();
        return static_cast<uint32_t>(words.size() - 1);
    }

    void grow() {
        slots.assign(2 * slots.size(), 0);
        std::vector<Byte> word;
        for (uint32_t number = 1; number < words.size(); number++) {
            word.assign(bytes.data() + words[number - 1].end, bytes.data() + words[number].end);
            const uint32_t size = static_cast<uint32_t>(word.size());
            word.resize(size + PADDING);
            slots[find(word.data(), size)] = number;
        }
    }
};

constexpr Byte lowered(Byte byte) { return byte >= 'A' && byte <= 'Z' ? static_cast<Byte>(byte + 32) : byte; }

enum Kind : Byte { MULTIBYTE, LETTER, SPACE, DROPPED, TOKEN, LESS };

struct Ascii {
    Byte kind[256] = {}, letter[256] = {};  // `letter`: in lower case; 0: none, or NUL

    constexpr Ascii() {
        for (int byte = 0; byte < 128; byte++) {
            kind[byte] = LETTER;
            letter[byte] = lowered(static_cast<Byte>(byte));
        }
        set("\t\n\v\f\r\x1c\x1d\x1e\x1f ;:", SPACE);
        set("\"", DROPPED);
        set("'.,()!?", TOKEN);
        set("<", LESS);
    }

    constexpr void set(const char* bytes, Kind value) {
        for (; *bytes; bytes++) {
            kind[static_cast<Byte>(*bytes)] = value;
            letter[static_cast<Byte>(*bytes)] = 0;
        }
    }
};
constexpr Ascii ASCII;

// In each byte of `bytes`, all below 0x80, the high bit if it is at least `least`.
constexpr uint64_t at_least(uint64_t bytes, char least) { return (bytes + (0x80 - least) * ONES) & HIGH; }

// The number of ASCII letters and digits with which the eight bytes begin: those in lower case, then zeros.
uint32_t take_letters(uint64_t& bytes) {
    const uint64_t low = bytes & ~HIGH, lower = low | 0x20 * ONES;
    const uint64_t letters = at_least(lower, 'a') & ~at_least(lower, 'z' + 1);
    const uint64_t digits = at_least(low, '0') & ~at_least(low, '9' + 1);
    const uint64_t others = ((letters | digits) & ~bytes & HIGH) ^ HIGH;
    bytes |= (letters & ~bytes) >> 2;  // 0x80 >> 2 is what lower case adds
    if (!others) return 8;
    const uint32_t count = static_cast<uint32_t>(__builtin_ctzll(others)) / 8;
    bytes &= (uint64_t{1} << 8 * count) - 1;
    return count;
}

// What follows "<br />" here, or null; quotation marks have been dropped before it is looked for.
const Byte* after_break(const Byte* text, const Byte* end) {
    for (const char* expected = "<br />"; *expected; expected++, text++) {
        while (text < end && *text == '"') text++;
        if (text == end || lowered(*text) != *expected) return nullptr;
    }
    return text;
}

// The code point of valid UTF-8, and behind it.
uint32_t decoded(const Byte*& text) {
    const uint32_t first = *text++;
    uint32_t code = first < 0xE0 ? first & 0x1F : first < 0xF0 ? first & 0x0F : first & 0x07;
    for (int more = first < 0xE0 ? 1 : first < 0xF0 ? 2 : 3; more; more--) code = code << 6 | (*text++ & 0x3F);
    return code;
}

Byte* encoded(Byte* out, uint32_t code) {
    if (code < 0x80) {
        *out++ = static_cast<Byte>(code);
        return out;
    }
    const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    *out++ = static_cast<Byte>((more == 1 ? 0xC0 : more == 2 ? 0xE0 : 0xF0) | code >> 6 * more);
    for (int left = more - 1; left >= 0; left--) *out++ = static_cast<Byte>(0x80 | (code >> 6 * left & 0x3F));
    return out;
}

// Calls `emit(word, bytes)` for each token. `lower`: of every code point below `limit`, 0 for white space; others stay.
template <class Emit>
void each_word(const Byte* text, uint64_t size, const uint32_t* lower, uint32_t limit, Emit emit) {
    const Byte* const end = text + size;
    // Two bytes may become three: U+0130, U+023A.
    Byte* const word = static_cast<Byte*>(malloc(size + size / 2 + 3 * PADDING));
    Byte* out = word;
    const Byte* padded = nullptr;  // zeros follow if it is `out`
    const auto flush = [&] {
        if (out == word) return;
        if (padded != out) memset(out, 0, PADDING);
        emit(word, static_cast<uint32_t>(out - word));
        out = word;
        padded = nullptr;
    };
    while (text < end) {
        if (ASCII.letter[*text]) {
            // A word of up to eight letters is stored once: the processor reads it back without waiting.
            for (uint32_t count = 8; count == 8 && end - text >= 8; text += count, padded = out += count) {
                uint64_t letters = eight(text);
                count = take_letters(letters);
                memcpy(out, &letters, 8);
                memset(out + 8, 0, PADDING);
            }
            while (text < end && ASCII.letter[*text]) *out++ = ASCII.letter[*text++];
            if (text == end) break;
        }
        switch (ASCII.kind[*text]) {
            case SPACE: flush(); text++; break;
            case TOKEN:
                flush();
                *out++ = *text++;
                flush();
                break;
            case DROPPED: text++; break;
            case LETTER: *out++ = *text++; break;  // NUL
            case LESS:
                if (const Byte* after = after_break(text, end)) {
                    flush();
                    text = after;
                } else {
                    *out++ = *text++;
                }
                break;
            default: {
                const uint32_t code = decoded(text), small = code < limit ? lower[code] : code;
                if (!small) flush();
                else out = encoded(out, small);
                if (code == 0x130) out = encoded(out, 0x307);  // the only letter whose lower case is two
            }
        }
    }
    flush();
    free(word);
}

// The values of all words, those of unknown ones are 0, into `out`, which has room for `size`. Returns their number.
template <class Number>
uint64_t encode_words(
    const Table* table, const Byte* text, uint64_t size, const uint32_t* lower, uint32_t limit, Number* out) {
    Number* next = out;
    each_word(text, size, lower, limit, [&](const Byte* word, uint32_t bytes) {
        *next++ = static_cast<Number>(table->value(word, bytes));
    });
    return next - out;
}

}  // namespace

extern "C" {

enum { PLAIN, HAS_SIGMA, INVALID };

// Whether the text is valid UTF-8, and has the one letter whose lower case depends on its neighbours.
int32_t examine(const Byte* text, uint64_t size) {
    const Byte* const end = text + size;
    bool sigma = false;
    while (text < end) {
        uint64_t eight;
        while (end - text >= 8 && (memcpy(&eight, text, 8), !(eight & 0x8080808080808080u))) text += 8;
        if (text == end) break;
        const Byte first = *text++;
        if (first < 0x80) continue;
        if (first < 0xC2 || first > 0xF4) return INVALID;
        const int more = first < 0xE0 ? 1 : first < 0xF0 ? 2 : 3;
        if (end - text < more) return INVALID;
        // Neither overlong nor a surrogate nor above U+10FFFF.
        const Byte least = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
        const Byte most = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
        if (*text < least || *text > most) return INVALID;
        sigma |= first == 0xCE && *text == 0xA3;
        for (int next = 1; next < more; next++)
            if ((text[next] & 0xC0) != 0x80) return INVALID;
        text += more;
    }
    return sigma ? HAS_SIGMA : PLAIN;
}

Table* table_new() { return new Table; }
void table_free(Table* table) { delete table; }
uint64_t table_words(const Table* table) { return table->words.size() - 1; }
uint64_t table_bytes(const Table* table) { return table->bytes.size(); }

// Add the values to those of the words: `bytes` joins the words, each of which ends at its `ends`.
void table_add(Table* table, const Byte* bytes, const uint64_t* ends, const uint64_t* values, uint64_t count) {
    std::vector<Byte> word;
    for (uint64_t start = 0, next = 0; next < count; start = ends[next++]) {
        word.assign(bytes + start, bytes + ends[next]);
        word.resize(word.size() + PADDING);
        table->words[table->number(word.data(), static_cast<uint32_t>(ends[next] - start))].value += values[next];
    }
}

void table_get(const Table* table, Byte* bytes, uint64_t* ends, uint64_t* values) {
    std::copy(table->bytes.begin(), table->bytes.end(), bytes);
    for (uint64_t word = 1; word < table->words.size(); word++) {
        ends[word - 1] = table->words[word].end;
        values[word - 1] = table->words[word].value;
    }
}

void count_words(Table* table, const Byte* text, uint64_t size, const uint32_t* lower, uint32_t limit) {
    each_word(text, size, lower, limit, [&](const Byte* word, uint32_t bytes) {
        table->words[table->number(word, bytes)].value++;
    });
}

uint64_t encode_words_16(
    const Table* table, const Byte* text, uint64_t size, const uint32_t* lower, uint32_t limit, uint16_t* out) {
    return encode_words(table, text, size, lower, limit, out);
}

uint64_t encode_words_32(
    const Table* table, const Byte* text, uint64_t size, const uint32_t* lower, uint32_t limit, uint32_t* out) {
    return encode_words(table, text, size, lower, limit, out);
}
}
