/* Vectors of 16 lanes whatever the instruction set, with every rounding written out.
 *
 * The file is compiled with -ffp-contract=off: a fused multiply-add happens exactly where fma_v says so, never where
 * a compiler finds one. All variants of a kernel therefore round alike, and AVX2, AVX-512 and NEON give the same bits.
 */
#ifndef STROP_VEC_H
#define STROP_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VL 16
#elif defined(__AVX2__) && defined(__FMA__)
#define VL 8
#else
#define VL 4
#endif

#define LANES 16
#define NV (LANES / VL)
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * VL)));
typedef float vf_u __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef struct {
    vf v[NV];
} v16;

INLINE long pad16(long n) { return (n + LANES - 1) / LANES * LANES; }

INLINE vf load_v(const float *p) { return *(const vf_u *)p; }
INLINE void store_v(float *p, vf x) { *(vf_u *)p = x; }

INLINE vf set_v(float s) {
#if defined(__AVX512F__)
    return (vf)_mm512_set1_ps(s);
#elif VL == 8
    return (vf)_mm256_set1_ps(s);
#else
    return (vf){s, s, s, s};
#endif
}

INLINE vf fma_v(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VL == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(__FMA__)
    return (vf)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#else
    return a * b + c; /* no fused unit: another equivalence class, still one fixed order */
#endif
}

/* a > b ? a : b, so b where one is NaN: what x86's instruction does. */
INLINE vf max_v(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif VL == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    vi mask = (vi)(a > b);
    return (vf)((mask & (vi)a) | (~mask & (vi)b));
#endif
}

/* a < b ? a : b, so b where one is NaN. */
INLINE vf min_v(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif VL == 8
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    vi mask = (vi)(a < b);
    return (vf)((mask & (vi)a) | (~mask & (vi)b));
#endif
}

/* exp(x) for x <= 88, within 1.1 units in the last place; 0 below -86.5; NaN stays NaN.
 * Cody-Waite reduction and the Cephes expf polynomial (Moshier, 1989). */
INLINE vf exp_v(vf x) {
    const vf low = set_v(-86.5f), high = set_v(88.0f), magic = set_v(12582912.0f);
    vf c = max_v(low, min_v(high, x));
    vf t = fma_v(c, set_v(1.44269504088896341f), magic);
    vf n = t - magic;
    vf r = fma_v(n, set_v(-0.693359375f), c);
    r = fma_v(n, set_v(2.12194440e-4f), r);
    vf square = r * r; /* pairs of coefficients (Estrin): a shorter chain of dependent operations */
    vf p = fma_v(set_v(1.9875691500e-4f), r, set_v(1.3981999507e-3f));
    p = fma_v(p, square, fma_v(set_v(8.3334519073e-3f), r, set_v(4.1665795894e-2f)));
    p = fma_v(p, square, fma_v(set_v(1.6666665459e-1f), r, set_v(5.0000001201e-1f)));
    vf y = fma_v(p, square, r) + set_v(1.0f);
    y = (vf)((vi)y + ((vi)t << 23));                      /* the low bits of t hold n */
    return (vf)(((vi)y & ~(vi)(x < low)) | (vi)(x != x)); /* all bits set is a NaN */
}

INLINE v16 load16(const float *p) {
    v16 r;
    for (int j = 0; j < NV; j++) r.v[j] = load_v(p + j * VL);
    return r;
}

INLINE void store16(float *p, v16 x) {
    for (int j = 0; j < NV; j++) store_v(p + j * VL, x.v[j]);
}

INLINE v16 set16(float s) {
    v16 r;
    for (int j = 0; j < NV; j++) r.v[j] = set_v(s);
    return r;
}

INLINE v16 fma16(v16 a, v16 b, v16 c) {
    for (int j = 0; j < NV; j++) c.v[j] = fma_v(a.v[j], b.v[j], c.v[j]);
    return c;
}

INLINE v16 mul16(v16 a, v16 b) {
    for (int j = 0; j < NV; j++) a.v[j] = a.v[j] * b.v[j];
    return a;
}

INLINE v16 add16(v16 a, v16 b) {
    for (int j = 0; j < NV; j++) a.v[j] = a.v[j] + b.v[j];
    return a;
}

INLINE v16 sub16(v16 a, v16 b) {
    for (int j = 0; j < NV; j++) a.v[j] = a.v[j] - b.v[j];
    return a;
}

INLINE v16 div16(v16 a, v16 b) {
    for (int j = 0; j < NV; j++) a.v[j] = a.v[j] / b.v[j];
    return a;
}

INLINE v16 max16(v16 a, v16 b) {
    for (int j = 0; j < NV; j++) a.v[j] = max_v(a.v[j], b.v[j]);
    return a;
}

INLINE v16 exp16(v16 a) {
    for (int j = 0; j < NV; j++) a.v[j] = exp_v(a.v[j]);
    return a;
}

/* The first n lanes of p, the rest filled. */
INLINE v16 load_part(const float *p, long n, float fill) {
    float t[LANES];
    for (long i = 0; i < LANES; i++) t[i] = i < n ? p[i] : fill;
    return load16(t);
}

/* The first n lanes of x, the rest filled. */
INLINE v16 keep_part(v16 x, long n, float fill) {
    static const int32_t lanes[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vi first = (vi)set_v(0.0f) + (int32_t)n, other = (vi)set_v(fill);
    for (int j = 0; j < NV; j++) {
        vi mask = (vi)load_v((const float *)lanes + j * VL) < first;
        x.v[j] = (vf)((mask & (vi)x.v[j]) | (~mask & other));
    }
    return x;
}

INLINE float sum_lanes(v16 x) {
    float t[LANES];
    store16(t, x);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) t[i] = t[i] + t[i + width];
    return t[0];
}

INLINE float max_lanes(v16 x) {
    float t[LANES];
    store16(t, x);
    float m = t[0];
    for (int i = 1; i < LANES; i++) m = t[i] > m ? t[i] : m;
    return m;
}

/* Natural logarithm of a positive normal number, below 1 unit in the last place; NaN stays NaN.
 * Algorithm of fdlibm's e_log.c (Sun Microsystems, 1993): our own, because a C library's may differ between machines. */
INLINE double log_d(double x) {
    if (!(x > 0) || x > 1.7e308) return x != x ? x : (x > 0 ? x : NAN);
    uint64_t bits;
    memcpy(&bits, &x, 8);
    int k = (int)(bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffffULL) | 0x3ff0000000000000ULL;
    double m;
    memcpy(&m, &bits, 8);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        k++;
    }
    double f = m - 1.0, s = f / (2.0 + f), z = s * s, w = z * z, h = 0.5 * f * f;
    double even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
    double odd =
        z * (6.666666666666735130e-01 + w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
    return k * 6.93147180369123816490e-01 - ((h - (s * (h + even + odd) + k * 1.90821492927058770002e-10)) - f);
}

#endif
