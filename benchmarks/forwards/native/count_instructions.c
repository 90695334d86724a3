// A plug-in of QEMU's that counts the instructions of a 64-bit Arm program between two of its own.
//
//   qemu-aarch64 -plugin ./libcount_instructions.so -d plugin PROGRAM
//
// The program executes BEGIN and END, which are hints that a processor ignores. At each END the plug-in writes a line of
// five counts: dot products, other vector arithmetic, loads and stores, prefetches, and everything else (addresses, loops).
//
// QEMU's interface for plug-ins is declared here, as distributions do not package its header: version 1 of it, which
// QEMU 4.2 to 8.2 have (docs/devel/tcg-plugins.rst of QEMU).
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

struct qemu_plugin_tb;
struct qemu_plugin_insn;
struct qemu_info_t;
typedef uint64_t qemu_plugin_id_t;
typedef void (*on_translation)(qemu_plugin_id_t, struct qemu_plugin_tb *);
typedef void (*on_instruction)(unsigned int, void *);
extern void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, on_translation);
extern void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *, on_instruction, int flags, void *);
extern size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
extern struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
extern const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *);
extern void qemu_plugin_outs(const char *);

EXPORT int qemu_plugin_version = 1;

enum Kind { DOTS, VECTORS, MEMORY, PREFETCHES, OTHERS, N_KINDS };
static uint64_t counts[N_KINDS];
static const uint32_t BEGIN = 0xd5032e1f, END = 0xd5032e3f;  // hint #112, hint #113

// The kind of an instruction: Arm Architecture Reference Manual, "A64 instruction set encoding".
static enum Kind kind_of(uint32_t code) {
  const uint32_t group = code >> 25 & 15;
  if ((code & 0xbfe0fc00) == 0x0e809400) return DOTS;   // sdot, vectors
  if ((code & 0xbfc0f400) == 0x0f80e000) return DOTS;   // sdot, by element
  if ((code & 0xffe0fc00) == 0x4e80a400) return DOTS;   // smmla
  if ((code & 0xffc00000) == 0xf9800000 || (code & 0xffe00c00) == 0xf8a00800 || (code & 0xffe00c00) == 0xf8800000)
    return PREFETCHES;
  if ((group & 5) == 4) return MEMORY;
  if ((group & 7) == 7) return VECTORS;
  return OTHERS;
}

static void count(unsigned int processor, void *counter) {
  (void)processor;
  ++*(uint64_t *)counter;
}

static void begin(unsigned int processor, void *unused) {
  (void)processor, (void)unused;
  memset(counts, 0, sizeof counts);
}

static void end(unsigned int processor, void *unused) {
  (void)processor, (void)unused;
  char line[5 * 21 + 2];
  snprintf(line, sizeof line, "%" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", counts[DOTS], counts[VECTORS],
           counts[MEMORY], counts[PREFETCHES], counts[OTHERS]);
  qemu_plugin_outs(line);
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *block) {
  (void)id;
  for (size_t i = 0; i < qemu_plugin_tb_n_insns(block); ++i) {
    struct qemu_plugin_insn *instruction = qemu_plugin_tb_get_insn(block, i);
    uint32_t code;
    memcpy(&code, qemu_plugin_insn_data(instruction), sizeof code);
    if (code == BEGIN) qemu_plugin_register_vcpu_insn_exec_cb(instruction, begin, 0, NULL);
    else if (code == END) qemu_plugin_register_vcpu_insn_exec_cb(instruction, end, 0, NULL);
    else qemu_plugin_register_vcpu_insn_exec_cb(instruction, count, 0, &counts[kind_of(code)]);
  }
}

EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const struct qemu_info_t *info, int n_arguments, char **arguments) {
  (void)info, (void)n_arguments, (void)arguments;
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  return 0;
}
