#include "gemm.h"

#define AHEAD 512 /* floats that are fetched early: weights and cached keys come from memory, once */

INLINE void tile(const int R, const int P, const int T, long k, const float *a, long lda, const float *b, long ldb, long ldp, float *c,
                 long ldc, gemm_mode mode) {
    vf acc[TILE][4 * NV];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int j = 0; j < P * NV; j++) acc[r][j] = mode == CONTINUE ? load_v(c + r * ldc + j * VL) : set_v(0.0f);
    for (long i = 0; i < k; i++) {
        vf col[4 * NV];
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) __builtin_prefetch(b + p * ldp + AHEAD);
#pragma GCC unroll 16
        for (int j = 0; j < P * NV; j++) col[j] = load_v(b + (j / NV) * ldp + (j % NV) * VL);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            vf x = set_v(T ? a[r] : a[r * lda]);
#pragma GCC unroll 16
            for (int j = 0; j < P * NV; j++) acc[r][j] = fma_v(x, col[j], acc[r][j]);
        }
        a += T ? lda : 1;
        b += ldb;
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int j = 0; j < P * NV; j++) {
            float *to = c + r * ldc + j * VL;
            store_v(to, mode == ADD ? load_v(to) + acc[r][j] : acc[r][j]);
        }
}

#define TILE_ARGS long k, const float *a, long lda, const float *b, long ldb, long ldp, float *c, long ldc, gemm_mode mode
#define DEFINE_TILE(R, P, T) \
    static __attribute__((noinline)) void tile_##R##_##P##_##T(TILE_ARGS) { tile(R, P, T, k, a, lda, b, ldb, ldp, c, ldc, mode); }
#define DEFINE_TILES(T)                                                                                                           \
    DEFINE_TILE(1, 1, T)                                                                                                          \
    DEFINE_TILE(2, 1, T)                                                                                                          \
    DEFINE_TILE(3, 1, T) DEFINE_TILE(4, 1, T) DEFINE_TILE(5, 1, T) DEFINE_TILE(6, 1, T) DEFINE_TILE(1, 2, T) DEFINE_TILE(2, 2, T) \
        DEFINE_TILE(3, 2, T) DEFINE_TILE(1, 4, T)
DEFINE_TILES(0)
DEFINE_TILES(1)

typedef void (*tile_fn)(TILE_ARGS);
/* [transposed][panels: 1, 2][rows - 1]; few rows take two panels at once, to keep enough sums in flight. */
static const tile_fn TILES[2][2][TILE] = {
    {{tile_1_1_0, tile_2_1_0, tile_3_1_0, tile_4_1_0, tile_5_1_0, tile_6_1_0}, {tile_1_2_0, tile_2_2_0, tile_3_2_0}},
    {{tile_1_1_1, tile_2_1_1, tile_3_1_1, tile_4_1_1, tile_5_1_1, tile_6_1_1}, {tile_1_2_1, tile_2_2_1, tile_3_2_1}},
};

INLINE void run(const int T, long rows, long panels, TILE_ARGS) {
    for (long r = 0; r < rows;) {
        /* 7 and 8 rows go as 4 + 3 and 4 + 4: a tile of 1 or 2 wastes the unit. */
        long left = rows - r, n = left <= TILE ? left : (left < 9 ? 4 : TILE);
        const float *ar = T ? a + r : a + r * lda;
        float *cr = c + r * ldc;
        long p = 0;
        if (n == 1)
            for (; p + 4 <= panels; p += 4) (T ? tile_1_4_1 : tile_1_4_0)(k, ar, lda, b + p * ldp, ldb, ldp, cr + p * LANES, ldc, mode);
        if (n <= 3)
            for (; p + 2 <= panels; p += 2) TILES[T][1][n - 1](k, ar, lda, b + p * ldp, ldb, ldp, cr + p * LANES, ldc, mode);
        for (; p < panels; p++) TILES[T][0][n - 1](k, ar, lda, b + p * ldp, ldb, ldp, cr + p * LANES, ldc, mode);
        r += n;
    }
}

void gemm(long rows, long panels, TILE_ARGS) { run(0, rows, panels, k, a, lda, b, ldb, ldp, c, ldc, mode); }

void gemm_t(long rows, long panels, TILE_ARGS) { run(1, rows, panels, k, a, lda, b, ldb, ldp, c, ldc, mode); }

void pack_transposed(const float *w, long ldw, long n, long k, float *out) {
    for (long p = 0; p * LANES < n; p++) {
        float *panel = out + p * k * LANES;
        for (long j = 0; j < LANES; j++) {
            long row = p * LANES + j;
            if (row < n)
                for (long i = 0; i < k; i++) panel[i * LANES + j] = w[row * ldw + i];
            else
                for (long i = 0; i < k; i++) panel[i * LANES + j] = 0.0f;
        }
    }
}

void pack_plain(const float *w, long ldw, long k, long n, float *out) {
    for (long p = 0; p * LANES < n; p++) {
        long width = n - p * LANES < LANES ? n - p * LANES : LANES;
        float *panel = out + p * k * LANES;
        for (long i = 0; i < k; i++)
            for (long j = 0; j < LANES; j++) panel[i * LANES + j] = j < width ? w[i * ldw + p * LANES + j] : 0.0f;
    }
}
