// Linear layers and attention over few tokens of a text, for the CPU this was compiled on.
//
// At a few tokens a pass the time goes into reading the weights once, and into what a call costs
// before it reads any. So weights are read in the order in which they lie, by all threads, and what
// surrounds a product (the norm before it, the gate or the residual after it) is done on the way.
//
// No output depends on how many tokens there are: every sum is taken in the order of its inputs,
// whether the tokens come one by one or as a tree. All sums are float32.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include <omp.h>

#ifdef __AVX512F__
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int LANES = 16;      // floats of a vector
constexpr int ROWS = 4;        // rows of a weight that share a load of the tokens
constexpr int TOKENS = 4;      // tokens that share a load of a weight, queries of a value
constexpr int SCORED = 8;      // queries that share a load of a key
constexpr int UNIT = 32;       // rows of a weight that a thread takes at a time: two tiles
constexpr int QUERIES = 16;    // queries that share a transposition of the keys

using Floats = float __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
using Integers = int32_t __attribute__((vector_size(64)));
using Halves = uint16_t __attribute__((vector_size(32)));
using Bytes = uint8_t __attribute__((vector_size(16)));

struct Bf16 {
    uint16_t bits;
};

float to_float(float x) { return x; }

float to_float(Bf16 x) {
    const uint32_t word = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

Floats load(const float* from) {
    Floats value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

Floats load(const Bf16* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
#ifdef __AVX512F__  // of which the compiler makes two halves put together
    const Words words = (Words)_mm512_cvtepu16_epi32((__m256i)halves);
#else
    const Words words = __builtin_convertvector(halves, Words);
#endif
    return (Floats)(words << 16);
}

void store(Floats x, float* to) { std::memcpy(to, &x, sizeof x); }

void store(Floats x, Bf16* to) {  // to nearest, ties to even
    const Words words = (Words)x;
    const Words nearest = (words + 0x7fff + (words >> 16 & 1)) >> 16;
    const Halves halves = __builtin_convertvector(x == x ? nearest : Words{} + 0x7fc0, Halves);
    std::memcpy(to, &halves, sizeof halves);
}

// As `load` and `store`, for the first `count` numbers only; the others are zero.
template <class T>
Floats load(const T* from, int count) {
    if (count >= LANES) return load(from);
    T numbers[LANES] = {};
    std::copy_n(from, count, numbers);
    return load(numbers);
}

template <class T>
void store(Floats x, T* to, int count) {
    if (count >= LANES) return store(x, to);
    T numbers[LANES];
    store(x, numbers);
    std::copy_n(numbers, count, to);
}

template <class T>
Floats rounded(Floats x) {
    T numbers[LANES];
    store(x, numbers);
    return load(numbers);
}

float sum(Floats x) {
    using Eight = float __attribute__((vector_size(32)));
    using Four = float __attribute__((vector_size(16)));
    const Eight eight = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                        __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    const Four four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) +
                      __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

// Swap rows and columns: four times, deal the rows of the two halves out in turn.
void transpose(Floats (&rows)[LANES]) {
    for (int time = 0; time < 4; time++) {
        Floats dealt[LANES];
        for (int i = 0; i < LANES / 2; i++) {
            const Floats one = rows[i], other = rows[i + LANES / 2];
            dealt[2 * i] = __builtin_shufflevector(one, other, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20,
                                                   5, 21, 6, 22, 7, 23);
            dealt[2 * i + 1] = __builtin_shufflevector(one, other, 8, 24, 9, 25, 10, 26, 11, 27,
                                                       12, 28, 13, 29, 14, 30, 15, 31);
        }
        std::copy_n(dealt, LANES, rows);
    }
}

Floats exponential(Floats x) {
    // 2^whole * e^part, the latter as a polynomial (Cephes): within 2e-7 of e^x, relatively.
    x = x < -87.0f ? Floats{} - 87.0f : x > 88.0f ? Floats{} + 88.0f : x;
    const Floats magic = Floats{} + 12582912.0f;  // adding it rounds to a whole number
    const Floats whole = (x * 1.44269504f + magic) - magic;
    const Floats part = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Floats power = Floats{} + 1.9875691500e-4f;
    for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                       5.0000001201e-1f})
        power = power * part + next;
    power = power * part * part + part + 1.0f;
    return power * (Floats)((__builtin_convertvector(whole, Integers) + 127) << 23);
}

// RMS norm of `size` numbers; rounds where transformers rounds, before and after the scale.
template <class T>
void normalise(const T* from, const T* weight, float eps, int size, T* to) {
    Floats squares = {};
    for (int i = 0; i < size; i += LANES) {
        const Floats x = load(from + i, size - i);
        squares += x * x;
    }
    const float scale = 1 / std::sqrt(sum(squares) / size + eps);
    for (int i = 0; i < size; i += LANES) {
        const Floats unit = rounded<T>(load(from + i, size - i) * scale);
        store(unit * load(weight + i, size - i), to + i, size - i);
    }
}

// Room for `size` elements that a thread keeps between calls.
template <class T, int PURPOSE>
T* scratch(size_t size) {
    static thread_local std::vector<T> held;
    static thread_local T* start = nullptr;
    constexpr size_t alignment = 64;
    if (held.size() < size + alignment) {
        held.assign(size + alignment, T{});
        const size_t address = reinterpret_cast<size_t>(held.data());
        start = held.data() + (alignment - address % alignment) % alignment / sizeof(T);
    }
    return start;
}

struct Share {
    int begin, end;
};

Share share_of(int n, int index, int n_threads) {
    return {int(int64_t(n) * index / n_threads), int(int64_t(n) * (index + 1) / n_threads)};
}

// Call work(first, size) for blocks of 0 .. count - 1 that hold N each and, at last, the rest; the
// size is a constant, so that what is summed for a block stays in registers.
template <int N, class Work>
void in_blocks(int count, Work work) {
    int first = 0;
    for (; first + N <= count; first += N) work(first, std::integral_constant<int, N>{});
    if constexpr (N > 1)
        if (first < count)
            in_blocks<N - 1>(count - first, [&](int i, auto size) { work(first + i, size); });
}

// --- products -----------------------------------------------------------------------------------

// out[t][r] = rows[r] . tokens[t], for R rows and N tokens of `size` numbers; t apart by 16.
template <int R, int N, class T>
void dots(const T* rows, const float* tokens, int size, float* out) {
    Floats sums[R][N] = {};
    int i = 0;
    for (; i + LANES <= size; i += LANES) {
        Floats weights[R];
        for (int r = 0; r < R; r++) weights[r] = load(rows + size_t(r) * size + i);
        for (int t = 0; t < N; t++) {
            const Floats token = load(tokens + size_t(t) * size + i);
            for (int r = 0; r < R; r++) sums[r][t] += weights[r] * token;
        }
    }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < N; t++) {
            float total = sum(sums[r][t]);
            for (int j = i; j < size; j++)
                total += to_float(rows[size_t(r) * size + j]) * tokens[size_t(t) * size + j];
            out[t * LANES + r] = total;
        }
}

// As `dots`, for any number of rows, at most 16, and of tokens.
template <class T>
void all_dots(const T* rows, int n_rows, const float* tokens, int n, int size, float* out) {
    in_blocks<ROWS>(n_rows, [&](int row, auto n_now) {
        in_blocks<TOKENS>(n, [&](int token, auto n_tokens) {
            dots<n_now, n_tokens>(rows + size_t(row) * size, tokens + size_t(token) * size, size,
                                  out + size_t(token) * LANES + row);
        });
    });
}

#ifdef __AMX_BF16__

constexpr int TILE = 16;         // rows of a tile, and tokens of one
constexpr int DEPTH = 32;        // bfloat16 numbers in a row of a tile
constexpr int GROUP = 2 * TILE;  // tokens that share a load of the weights

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    TileShapes() {
        std::fill_n(row_bytes, 8, 64);
        std::fill_n(rows, 8, TILE);
    }
};

// Lay tokens [n, size] out as tiles of 16 pairs x 16 tokens, [groups, size / 32, tiles, 16, 16];
// a group is two tiles of tokens, or one where no more are left.
void lay_out(const Bf16* tokens, int n, int size, Bf16* tiles) {
    for (int first = 0; first < n; first += GROUP) {
        const int end = std::min(first + GROUP, n);
        for (int i = 0; i < size; i += DEPTH)
            for (int token = first; token < end; token += TILE, tiles += TILE * DEPTH) {
                Floats pairs[TILE] = {};  // of the tokens' bfloat16 numbers
                for (int t = 0; t < std::min(TILE, end - token); t++)
                    std::memcpy(&pairs[t], tokens + size_t(token + t) * size + i, 64);
                transpose(pairs);
                std::memcpy(tiles, pairs, sizeof pairs);
            }
    }
}

// out[i][j][r][t] = rows[i][r] . tokens[j][t], for two tiles of rows and N of tokens.
template <int N>
void tile_dots(const Bf16* first, const Bf16* second, const Bf16* tokens, int size,
               Floats (*out)[N][TILE]) {
    const size_t row_bytes = size * sizeof(Bf16);
    _tile_zero(0);
    _tile_zero(1);
    if (N > 1) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int i = 0; i < size; i += DEPTH) {
        _tile_loadd(4, first + i, row_bytes);
        _tile_loadd(5, second + i, row_bytes);
        _tile_loadd(6, tokens, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (N > 1) {
            _tile_loadd(7, tokens + TILE * DEPTH, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        tokens += N * TILE * DEPTH;
    }
    _tile_stored(0, out[0][0], 64);
    _tile_stored(1, out[1][0], 64);
    if (N > 1) {
        _tile_stored(2, out[0][N - 1], 64);
        _tile_stored(3, out[1][N - 1], 64);
    }
}

bool has_tiles() {  // the kernel grants the tiles to a process that asks for them
    constexpr int request_permission = 0x1023, tile_data = 18;
    static const bool granted = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    return granted;
}

#endif

// --- linear layers ------------------------------------------------------------------------------

template <class T>
struct Linear {
    const T* x;         // [n, size]
    const T* norm;      // [size], weights of an RMS norm of x; null for none
    float eps;          // of the norm
    const T* weight;    // [n_rows, size]; gates first, then what they let through, if gated
    const T* bias;      // [n_rows]; null for none
    const T* residual;  // [n, n_out], added to the result; null for none
    T* y;               // [n, n_out]
    int n, size, n_rows;
    bool gated;         // y = silu(first half) * second half

    int n_out() const { return gated ? n_rows / 2 : n_rows; }

    // Finish outputs of one token, from `count` rows of the weight on and, if gated, their pairs.
    void finish(int token, int row, int count, Floats value, Floats passed) const {
        if (bias) value += load(bias + row, count);
        if (gated) {
            if (bias) passed += load(bias + n_out() + row, count);
            value = value / (1 + exponential(-value)) * passed;
        }
        const size_t at = size_t(token) * n_out() + row;
        if (residual) value += load(residual + at, count);
        store(value, y + at, count);
    }

    const T* input() const {
        if (!norm) return x;
        T* to = scratch<T, 0>(size_t(n) * size);
        for (size_t i = 0; i < size_t(n) * size; i += size)
            normalise(x + i, norm, eps, size, to + i);
        return to;
    }

    void run(int index, int n_threads) const {
        const int step = gated ? UNIT / 2 : UNIT;
        const Share units = share_of((n_out() + step - 1) / step, index, n_threads);
        const int begin = units.begin * step, end = std::min(units.end * step, n_out());
        if (begin >= end) return;
        if (!run_tiles(begin, end)) run_vectors(begin, end);
    }

    void run_vectors(int begin, int end) const {
        const T* from = input();
        float* tokens = scratch<float, 1>(size_t(n) * size);
        for (size_t i = 0; i < size_t(n) * size; i++) tokens[i] = to_float(from[i]);
        float* values = scratch<float, 2>(2 * size_t(n) * LANES);
        float* passed = values + size_t(n) * LANES;
        for (int row = begin; row < end; row += LANES) {
            const int count = std::min(LANES, end - row);
            all_dots(weight + size_t(row) * size, count, tokens, n, size, values);
            if (gated)
                all_dots(weight + size_t(n_out() + row) * size, count, tokens, n, size, passed);
            for (int t = 0; t < n; t++)
                finish(t, row, count, load(values + t * LANES), load(passed + t * LANES));
        }
    }

    bool run_tiles(int, int) const { return false; }

    template <int N>
    void run_group(const T* first, const T* second, const T* group, int token, int row) const;
};

#ifdef __AMX_BF16__

// Compute the outputs of two tiles of rows for a group of N tiles of tokens.
template <>
template <int N>
void Linear<Bf16>::run_group(const Bf16* first, const Bf16* second, const Bf16* group, int token,
                             int row) const {
    Floats out[2][N][TILE];
    tile_dots<N>(first, second, group, size, out);
    for (int tile = 0; tile < N; tile++) {
        const int begin = token + tile * TILE;
        auto &one = out[0][tile], &other = out[1][tile];
        transpose(one);
        transpose(other);
        for (int t = 0; t < std::min(TILE, n - begin); t++) {
            finish(begin + t, row, TILE, one[t], other[t]);
            if (!gated) finish(begin + t, row + TILE, TILE, other[t], one[t]);
        }
    }
}

template <>
bool Linear<Bf16>::run_tiles(int begin, int end) const {
    if (size % DEPTH || n_rows % GROUP || !has_tiles()) return false;
    Bf16* tiles = scratch<Bf16, 3>((size_t(n) + TILE) * size);
    lay_out(input(), n, size, tiles);
    const TileShapes shapes;
    _tile_loadconfig(&shapes);
    for (int row = begin; row < end; row += gated ? TILE : 2 * TILE) {
        const Bf16* first = weight + size_t(row) * size;
        const Bf16* second = first + size_t(gated ? n_out() : TILE) * size;
        for (int token = 0; token < n; token += GROUP) {
            const Bf16* group = tiles + size_t(token) * size;
            if (n - token > TILE)
                run_group<2>(first, second, group, token, row);
            else
                run_group<1>(first, second, group, token, row);
        }
    }
    _tile_release();
    return true;
}

#endif

template <class T>
void linear(const T* x, const T* norm, float eps, const T* weight, const T* bias, const T* residual,
            T* y, int n, int size, int n_rows, int gated, int n_threads) {
    const Linear<T> layer{x, norm, eps, weight, bias, residual, y, n, size, n_rows, gated != 0};
#pragma omp parallel num_threads(n_threads)
    layer.run(omp_get_thread_num(), omp_get_num_threads());
}

// --- attention ----------------------------------------------------------------------------------

template <class T>
struct Attention {
    T* states;             // [n, n_heads + 2 n_groups, dim], queries, keys and values of new tokens
    const T* cos;          // [n, dim]
    const T* sin;          // [n, dim], the first half negated
    const T* head_norm;    // [n_heads + n_groups, dim], RMS norm of each head; null for none
    float eps;             // of the norm
    T* keys;               // [n_groups, stride / dim, dim], of which start + n are used
    T* values;             // likewise
    int64_t stride;        // between the groups of keys and of values
    const uint8_t* mask;   // [n, mask_width], who attends to whom; null for causal
    int64_t mask_width;    // start + n or more
    T* out;                // [n, n_heads, dim]
    int n, start, n_heads, n_groups, dim;

    int n_states() const { return n_heads + 2 * n_groups; }
    float scale() const { return 1 / std::sqrt(float(dim)); }

    // Norm and rotate one head of one token, in place.
    void rotate(int token, int head) const {
        T* x = states + (size_t(token) * n_states() + head) * dim;
        if (head_norm) normalise(x, head_norm + size_t(head) * dim, eps, dim, x);
        const T* c = cos + size_t(token) * dim;
        const T* s = sin + size_t(token) * dim;
        for (int i = 0, j = dim / 2; j < dim; i += LANES, j += LANES) {
            const int count = dim - j;
            const Floats left = load(x + i, count), right = load(x + j, count);
            store(left * load(c + i, count) + right * load(s + i, count), x + i, count);
            store(right * load(c + j, count) + left * load(s + j, count), x + j, count);
        }
    }

    // Rotate a thread's share of the new tokens and write their keys and values to the cache.
    void enter(int index, int n_threads) const {
        const Share tokens = share_of(n, index, n_threads);
        for (int token = tokens.begin; token < tokens.end; token++) enter(token);
    }

    void enter(int token) const {
        for (int head = 0; head < n_heads + n_groups; head++) rotate(token, head);
        const T* from = states + (size_t(token) * n_states() + n_heads) * dim;
        for (int group = 0; group < n_groups; group++) {
            const size_t to = group * stride + size_t(start + token) * dim;
            std::copy_n(from + size_t(group) * dim, dim, keys + to);
            std::copy_n(from + size_t(n_groups + group) * dim, dim, values + to);
        }
    }

    // Attend with a thread's share of the queries, in blocks of one group.
    void run(int index, int n_threads) const {
        const int n_queries = n * (n_heads / n_groups);  // of a group
        const int fair = (n_queries * n_groups + n_threads - 1) / n_threads;
        const int n_at_once = std::min({fair, n_queries, QUERIES});
        const int n_blocks = (n_queries + n_at_once - 1) / n_at_once;
        const Share blocks = share_of(n_blocks * n_groups, index, n_threads);
        for (int block = blocks.begin; block < blocks.end; block++) {
            const int first = block % n_blocks * n_at_once;
            attend(block / n_blocks, first, std::min(n_at_once, n_queries - first));
        }
    }

    // The keys a query may see, rounded up to the two tiles that are scored at once.
    size_t padded_keys() const { return size_t(start + n + UNIT - 1) / UNIT * UNIT; }

    // Token and head of one of the queries of a group, counted token by token.
    int token_of(int index) const { return index / (n_heads / n_groups); }

    int head_of(int group, int index) const {
        const int n_shared = n_heads / n_groups;
        return group * n_shared + index % n_shared;
    }

    const T* query(int group, int index) const {
        return states + (size_t(token_of(index)) * n_states() + head_of(group, index)) * dim;
    }

    // scores[q][k] = scale * queries[q] . keys[k] for N queries and 16 keys, given by dimension.
    template <int N>
    void score(const float* queries, const Floats* by_dimension, float* scores,
               size_t width) const {
        Floats sums[N] = {};
        for (int i = 0; i < dim; i++)
            for (int q = 0; q < N; q++) sums[q] += by_dimension[i] * queries[q * dim + i];
        for (int q = 0; q < N; q++) store(sums[q] * scale(), scores + q * width);
    }

    // scores[q][k] of `count` queries of a group and all keys.
    void score_vectors(int group, int first, int count, float* scores) const {
        const size_t padded = padded_keys();
        float* queries = scratch<float, 4>(size_t(count) * dim);
        for (int q = 0; q < count; q++)
            for (int i = 0; i < dim; i += LANES)
                store(load(query(group, first + q) + i), queries + q * dim + i);
        Floats* by_dimension = (Floats*)scratch<float, 6>(size_t(dim) * LANES);
        const int total = start + n;
        for (int key = 0; key < total; key += LANES) {
            for (int i = 0; i < dim; i += LANES) {
                Floats rows[LANES] = {};
                for (int k = 0; k < std::min(LANES, total - key); k++)
                    rows[k] = load(keys + group * stride + size_t(key + k) * dim + i);
                transpose(rows);
                std::copy_n(rows, LANES, by_dimension + i);
            }
            in_blocks<SCORED>(count, [&](int q, auto n_now) {
                score<n_now>(queries + q * dim, by_dimension, scores + q * padded + key, padded);
            });
        }
    }

    bool score_tiles(int, int, int, float*) const { return false; }

    // Turn the scores of a token's query into weights that are yet to be divided by their sum.
    void weigh(int token, float* scores, int padded) const {
        const int total = start + n;
        const uint8_t* row = mask ? mask + token * mask_width : nullptr;
        const Floats hidden = Floats{} - std::numeric_limits<float>::infinity();
        Integers place = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        Floats most = hidden;
        for (int i = 0; i < padded; i += LANES, place += LANES) {
            Integers seen = place < (mask ? total : start + token + 1);
            if (mask) {
                Bytes bytes = {};
                std::memcpy(&bytes, row + i, std::clamp(total - i, 0, LANES));
                seen &= __builtin_convertvector(bytes, Integers) != 0;
            }
            const Floats score = seen ? load(scores + i) : hidden;
            most = score > most ? score : most;
            store(score, scores + i);
        }
        const float highest = *std::max_element((float*)&most, (float*)&most + LANES);
        for (int i = 0; i < padded; i += LANES) {
            const Floats score = load(scores + i);
            store(score == hidden ? Floats{} : exponential(score - highest), scores + i);
        }
    }

    // Mix C x 16 dimensions of the values by the weights of N queries, key after key: keys that
    // a query does not see add zeros, so that they might as well not be there.
    template <int N, int C>
    void mix(const T* value, const float* weights, size_t width, T* const* to, int part) const {
        Floats mixed[N][C] = {}, totals[N] = {};
        for (int key = 0; key < start + n; key++, value += dim) {
            Floats loaded[C];
            for (int c = 0; c < C; c++) loaded[c] = load(value + c * LANES);
            for (int q = 0; q < N; q++) {
                // Subtracting zero changes no number, so that only a broadcast is left of it.
                const Floats weight = weights[q * width + key] - Floats{};
                totals[q] += weight;
                for (int c = 0; c < C; c++) mixed[q][c] += weight * loaded[c];
            }
        }
        for (int q = 0; q < N; q++)
            for (int c = 0; c < C; c++) store(mixed[q][c] / totals[q], to[q] + part + c * LANES);
    }

    // Attend with the queries `first` to `first + count` of a group; token by token, its heads.
    void attend(int group, int first, int count) const {
        const size_t padded = padded_keys();
        float* scores = scratch<float, 5>(count * padded);
        if (!score_tiles(group, first, count, scores)) score_vectors(group, first, count, scores);
        T* to[QUERIES];
        for (int q = 0; q < count; q++) {
            const int token = token_of(first + q);
            weigh(token, scores + q * padded, padded);
            to[q] = out + (size_t(token) * n_heads + head_of(group, first + q)) * dim;
        }
        in_blocks<TOKENS>(count, [&](int q, auto n_now) {
            in_blocks<4>(dim / LANES, [&](int part, auto n_parts) {
                mix<n_now, n_parts>(values + group * stride + part * LANES, scores + q * padded,
                                    padded, to + q, part * LANES);
            });
        });
    }
};

#ifdef __AMX_BF16__

template <>
bool Attention<Bf16>::score_tiles(int group, int first, int count, float* scores) const {
    if (dim % DEPTH || !has_tiles()) return false;
    Bf16* queries = scratch<Bf16, 7>(2 * size_t(TILE) * dim);
    Bf16* tiles = queries + size_t(TILE) * dim;
    for (int q = 0; q < count; q++) std::copy_n(query(group, first + q), dim, queries + q * dim);
    lay_out(queries, count, dim, tiles);
    const TileShapes shapes;
    _tile_loadconfig(&shapes);
    const int total = start + n;
    for (int key = 0; key < total; key += 2 * TILE) {
        const Bf16* rows = keys + group * stride + size_t(key) * dim;
        if (total - key < 2 * TILE) {  // what follows may not be the cache's
            Bf16* last = scratch<Bf16, 8>(2 * size_t(TILE) * dim);
            std::copy_n(rows, size_t(total - key) * dim, last);
            rows = last;
        }
        Floats out[2][1][TILE];
        tile_dots<1>(rows, rows + size_t(TILE) * dim, tiles, dim, out);
        for (int half = 0; half < 2; half++) {
            transpose(out[half][0]);
            for (int q = 0; q < count; q++)
                store(out[half][0][q] * scale(), scores + q * padded_keys() + key + half * TILE);
        }
    }
    _tile_release();
    return true;
}

#endif

// --- decoder layers -----------------------------------------------------------------------------

}  // namespace

// The texts of a pass. Their new tokens lie one after another; each has keys of its own.
struct Texts {
    const int *counts, *starts;  // of each, its new tokens and the keys before them
    const uint8_t* mask;         // [n, mask_rows, mask_width], who attends to whom; null for causal
    int64_t mask_rows, mask_width;
    int n;
};

// The weights of a layer; their shapes are those of `Linear` and `Attention`.
struct LayerWeights {
    const void *norm, *qkv, *qkv_bias, *head_norm, *out, *mlp_norm, *gate_up, *down;
    float eps, head_eps, mlp_eps;
    int size_in, n_heads, n_groups, dim, inner, size;
};

namespace {

// keys and values: [texts, n_groups, .., dim]; the strides are those between texts and groups.
template <class T>
void layer(const LayerWeights& weights, const Texts& texts, const T* x, const T* residual,
           const T* cos, const T* sin, T* keys, T* values, int64_t text_stride, int64_t stride,
           T* y, int n, int n_threads) {
    const auto& [norm, qkv, qkv_bias, head_norm, out, mlp_norm, gate_up, down, eps, head_eps,
                 mlp_eps, size_in, n_heads, n_groups, dim, inner, size] = weights;
    const int n_states = n_heads + 2 * n_groups;
    T* states = scratch<T, 9>(size_t(n) * (n_states * dim + n_heads * dim + size + inner));
    T* attended = states + size_t(n) * n_states * dim;
    T* between = attended + size_t(n) * n_heads * dim;
    T* passed = between + size_t(n) * size;
    const auto at = [](const void* pointer) { return static_cast<const T*>(pointer); };
    const T* none = nullptr;
    const Linear<T> project{x,    at(norm), eps,  at(qkv), at(qkv_bias), none, states,
                            n,    size_in,  n_states * dim, false};
    const auto attention = [&](int text, int first) {
        const uint8_t* mask = texts.mask;
        if (mask) mask += text * texts.mask_rows * texts.mask_width;
        const size_t begin = size_t(first) * dim;
        return Attention<T>{states + begin * n_states,
                            cos + begin,
                            sin + begin,
                            at(head_norm),
                            head_eps,
                            keys + text * text_stride,
                            values + text * text_stride,
                            stride,
                            mask,
                            texts.mask_width,
                            attended + begin * n_heads,
                            texts.counts[text],
                            texts.starts[text],
                            n_heads,
                            n_groups,
                            dim};
    };
    const Linear<T> leave{attended, none, 0, at(out), none, residual, between, n, n_heads * dim, size,
                          false};
    const Linear<T> gate{between, at(mlp_norm), mlp_eps, at(gate_up), none, none, passed, n, size,
                         2 * inner, true};
    const Linear<T> lower{passed, none, 0, at(down), none, between, y, n, inner, size, false};
#pragma omp parallel num_threads(n_threads)
    {
        const int index = omp_get_thread_num(), n_here = omp_get_num_threads();
        // Shares of a text with few tokens are uneven: threads take turns at the smallest.
        const auto of_each_text = [&](auto work) {
            for (int text = 0, first = 0; text < texts.n; first += texts.counts[text++])
                work(attention(text, first), (index + text) % n_here);
        };
        project.run(index, n_here);
#pragma omp barrier
        of_each_text([&](const auto& text, int share) { text.enter(share, n_here); });
#pragma omp barrier
        of_each_text([&](const auto& text, int share) { text.run(share, n_here); });
#pragma omp barrier
        leave.run(index, n_here);
#pragma omp barrier
        gate.run(index, n_here);
#pragma omp barrier
        lower.run(index, n_here);
    }
}

}  // namespace

#define SPECTUNE_EXPORT(T, name)                                                                    \
    void linear_##name(const T* x, const T* norm, float eps, const T* weight, const T* bias,        \
                       const T* residual, T* y, int n, int size, int n_rows, int gated,             \
                       int n_threads) {                                                             \
        linear(x, norm, eps, weight, bias, residual, y, n, size, n_rows, gated, n_threads);         \
    }                                                                                               \
    void layer_##name(const LayerWeights* weights, const Texts* texts, const T* x,                  \
                      const T* residual, const T* cos, const T* sin, T* keys, T* values,            \
                      int64_t text_stride, int64_t stride, T* y, int n, int n_threads) {            \
        layer(*weights, *texts, x, residual, cos, sin, keys, values, text_stride, stride, y, n,     \
              n_threads);                                                                           \
    }                                                                                               \
    void normalise_##name(const T* x, const T* weight, float eps, T* y, int n, int size) {          \
        for (size_t i = 0; i < size_t(n) * size; i += size)                                         \
            normalise(x + i, weight, eps, size, y + i);                                             \
    }

extern "C" {
SPECTUNE_EXPORT(Bf16, bfloat16)
SPECTUNE_EXPORT(float, float32)

int multiplies_tiles() {
#ifdef __AMX_BF16__
    return has_tiles();
#else
    return 0;
#endif
}
}
