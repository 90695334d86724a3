// The handler of SIGBUS, and the list of mappings in which it looks up a fault's address.
//
// At a fault inside of a mapping, the handler maps zeros over all of it and sets its flag: the thread goes on, and the next
// check of the mapping fails. Any other SIGBUS goes to the handler that was there before, or ends the process as it would
// have without this one.
#include "weights/mapping.h"

#if defined(_WIN32)

namespace edgedec {

struct MappedRange {};
Mapping::Mapping(const void *, uint64_t, int64_t) {}
Mapping::~Mapping() {}
void Mapping::check() const {}
FaultsUnblocked::FaultsUnblocked() {}
FaultsUnblocked::~FaultsUnblocked() {}
void unblock_faults() {}

}  // namespace edgedec

#else

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <utility>

namespace edgedec {

// An entry of the handler's list. Entries are reused but never freed, as a handler may be reading them.
struct MappedRange {
  std::atomic<uintptr_t> begin{0}, end{0};  // end 0: not in use
  std::atomic<bool> broken{false};
  MappedRange *next = nullptr;
};

namespace {

std::mutex registry;  // guards the list and the handler against changes; the handler never takes it
std::atomic<MappedRange *> ranges{nullptr};
int n_mappings = 0;

// --- in the handler: nothing but lock-free atomics and system calls ---------------------------------------------------

MappedRange *find(uintptr_t address) {
  for (MappedRange *range = ranges.load(std::memory_order_acquire); range != nullptr; range = range->next) {
    const uintptr_t end = range->end.load(std::memory_order_acquire);
    const uintptr_t begin = range->begin.load(std::memory_order_acquire);
    // An entry that was reused meanwhile has another end.
    if (begin <= address && address < end && range->end.load(std::memory_order_acquire) == end) return range;
  }
  return nullptr;
}

// Whether a process sent the signal, so that it is about no address.
bool was_sent(const siginfo_t *info) { return info->si_code <= 0 || info->si_code == SI_USER; }

bool put_zeros(const siginfo_t *info) {
  if (was_sent(info)) return false;
  MappedRange *range = find((uintptr_t)info->si_addr);
  if (range == nullptr) return false;
  range->broken.store(true, std::memory_order_release);
  const uintptr_t begin = range->begin.load(std::memory_order_relaxed);
  // Read-only private zeros take no memory, however large.
  return mmap((void *)begin, range->end.load(std::memory_order_relaxed) - begin, PROT_READ,
              MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED;
}

// A handler calls the one that it was installed on top of. An application may install its own handler on top of this one,
// keep this one as the next, and find this one on top again: with one function for all places in the stack of handlers, the
// two would call each other for ever. So each place has a function of its own, and its predecessor never changes.
constexpr int N_PLACES = 16;
struct sigaction before[N_PLACES];
std::atomic<bool> once_called[N_PLACES];
int n_places = 0;

void end_process(const siginfo_t *info) {
  struct sigaction ending {};
  ending.sa_handler = SIG_DFL;
  sigaction(SIGBUS, &ending, nullptr);
  if (was_sent(info)) raise(SIGBUS);  // else the instruction runs again, and its fault ends the process
}

void pass_on(int place, int number, siginfo_t *info, void *context) {
  const struct sigaction &next = before[place];
  if ((next.sa_flags & SA_RESETHAND) != 0 && once_called[place].exchange(true)) return end_process(info);
  if ((next.sa_flags & SA_SIGINFO) != 0) return next.sa_sigaction(number, info, context);
  if (next.sa_handler == SIG_IGN && was_sent(info)) return;
  if (next.sa_handler == SIG_DFL || next.sa_handler == SIG_IGN) return end_process(info);
  next.sa_handler(number);
}

template <int PLACE>
void on_fault(int number, siginfo_t *info, void *context) {
  const int saved = errno;
  if (!put_zeros(info)) pass_on(PLACE, number, info, context);
  errno = saved;
}

// --- outside the handler ------------------------------------------------------------------------------------------------

using Handler = void (*)(int, siginfo_t *, void *);

template <int... PLACES>
Handler handler_of(int place, std::integer_sequence<int, PLACES...>) {
  static const Handler all[] = {on_fault<PLACES>...};
  return all[place];
}
Handler handler_of(int place) { return handler_of(place, std::make_integer_sequence<int, N_PLACES>()); }

// Return the place of a handler of this library, -1 for any other handler.
int place_of(const struct sigaction &action) {
  if ((action.sa_flags & SA_SIGINFO) == 0) return -1;
  for (int place = 0; place < N_PLACES; ++place)
    if (action.sa_sigaction == handler_of(place)) return place;
  return -1;
}

bool same_handler(const struct sigaction &a, const struct sigaction &b) {
  if (a.sa_flags != b.sa_flags) return false;
  return (a.sa_flags & SA_SIGINFO) != 0 ? a.sa_sigaction == b.sa_sigaction : a.sa_handler == b.sa_handler;
}

// Put a handler of this library on top, unless one is there. Do nothing where all places are taken.
void be_on_top() {
  struct sigaction top {};
  if (sigaction(SIGBUS, nullptr, &top) != 0 || place_of(top) >= 0) return;
  int place = 0;
  while (place < n_places && !same_handler(before[place], top)) ++place;
  if (place == N_PLACES) return;
  if (place == n_places) {
    before[place] = top;
    ++n_places;
  }
  once_called[place].store(false);
  struct sigaction ours {};
  ours.sa_sigaction = handler_of(place);
  // The signals that the next handler wants blocked, and its way of being called, are taken over from it.
  ours.sa_mask = top.sa_mask;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | (top.sa_flags & (SA_NODEFER | SA_RESTART));
  sigaction(SIGBUS, &ours, nullptr);
}

void leave_top() {
  struct sigaction top {};
  if (sigaction(SIGBUS, nullptr, &top) != 0) return;
  const int place = place_of(top);
  if (place >= 0) sigaction(SIGBUS, &before[place], nullptr);  // handlers on top of this one may still call it
}

MappedRange *free_range() {
  for (MappedRange *range = ranges.load(); range != nullptr; range = range->next)
    if (range->end.load() == 0) return range;
  auto *range = new MappedRange;
  range->next = ranges.load();
  ranges.store(range, std::memory_order_release);
  return range;
}

struct FileState {
  int64_t n_bytes, modified_s, modified_ns;
};

bool read_state(int64_t file, FileState &state) {
  struct stat found {};
  if (fstat((int)file, &found) != 0) return false;
#if defined(__APPLE__)
  const struct timespec modified = found.st_mtimespec;
#else
  const struct timespec modified = found.st_mtim;
#endif
  state = {(int64_t)found.st_size, (int64_t)modified.tv_sec, (int64_t)modified.tv_nsec};
  return true;
}

}  // namespace

Mapping::Mapping(const void *data, uint64_t n_bytes, int64_t file) : file_(file), pid_(getpid()) {
  FileState state{};
  if (file >= 0 && !read_state(file, state)) throw Unreadable("the mapped file can't be looked at");
  n_file_bytes_ = state.n_bytes;
  modified_s_ = state.modified_s;
  modified_ns_ = state.modified_ns;
  const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
  std::lock_guard<std::mutex> guard(registry);
  range_ = free_range();
  range_->broken.store(false);
  range_->begin.store((uintptr_t)data);
  range_->end.store((uintptr_t)data + (uintptr_t)((n_bytes + page - 1) / page * page), std::memory_order_release);
  ++n_mappings;
  be_on_top();
}

Mapping::~Mapping() {
  range_->end.store(0, std::memory_order_release);
  if (getpid() != pid_) return;  // after fork() another thread may have held the lock
  std::lock_guard<std::mutex> guard(registry);
  if (--n_mappings == 0) leave_top();
}

void Mapping::check() const {
  struct sigaction top {};
  if (sigaction(SIGBUS, nullptr, &top) == 0 && place_of(top) < 0) {
    std::lock_guard<std::mutex> guard(registry);
    be_on_top();
  }
  if (range_->broken.load(std::memory_order_acquire))
    throw Unreadable("the mapped weights could not be read: their file was cut short, or its disk fails");
  FileState now{};
  if (file_ < 0) return;
  if (!read_state(file_, now)) throw Unreadable("the mapped file can't be looked at");
  if (now.n_bytes != n_file_bytes_ || now.modified_s != modified_s_ || now.modified_ns != modified_ns_)
    throw Unreadable("the file of the weights was changed while they were in use");
}

FaultsUnblocked::FaultsUnblocked() {
  sigset_t fault, old;
  sigemptyset(&fault);
  sigaddset(&fault, SIGBUS);
  was_blocked_ = pthread_sigmask(SIG_UNBLOCK, &fault, &old) == 0 && sigismember(&old, SIGBUS) == 1;
}

FaultsUnblocked::~FaultsUnblocked() {
  if (!was_blocked_) return;
  sigset_t fault;
  sigemptyset(&fault);
  sigaddset(&fault, SIGBUS);
  pthread_sigmask(SIG_BLOCK, &fault, nullptr);
}

void unblock_faults() {
  sigset_t fault;
  sigemptyset(&fault);
  sigaddset(&fault, SIGBUS);
  pthread_sigmask(SIG_UNBLOCK, &fault, nullptr);
}

}  // namespace edgedec

#endif
