#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <iterator>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace allreduced {
namespace {

// A piece is what one thread takes: small enough to share a tile's work and to let an urgent job in between, big enough
// that taking it costs nothing.
constexpr std::size_t kPieceBytes = std::size_t{256} << 10;
constexpr std::size_t kCacheLine = 64;  // pieces end on multiples, so that no two threads write one line
constexpr int kMostThreads = 1024;

struct Job {
    Job(std::int64_t id_, Request request_) : id(id_), request(std::move(request_)) {
        const std::size_t bytes = request.count() * request.itemsize();
        const std::size_t pieces = bytes / kPieceBytes + (bytes % kPieceBytes != 0);
        if (pieces > 1) {
            const std::size_t line = kCacheLine / request.itemsize();
            piece = (request.count() / pieces + line) / line * line;
        } else {
            piece = request.count();
        }
    }

    const std::int64_t id;
    const Request request;
    std::size_t piece;        // elements of every piece but the last
    std::size_t taken = 0;    // elements that threads have taken
    std::size_t finished = 0; // elements that are done
};

// Higher priority first, then the order of submission.
using Place = std::pair<std::int64_t, std::uint64_t>;
struct Before {
    bool operator()(const Place& a, const Place& b) const {
        return a.first != b.first ? a.first > b.first : a.second < b.second;
    }
};

// The jobs of one share. Of all shares the one that used least has the next turn. One that comes (again) begins where the
// others are, so that it cannot save up turns while it has nothing to do.
struct Share {
    std::uint64_t used = 0;  // bytes read and written
    std::map<Place, std::shared_ptr<Job>, Before> waiting;  // never empty
};

std::system_error failure(int error, const std::string& what) {
    return std::system_error(error, std::generic_category(), what);
}

// Blocks all signals of the calling thread while it lives. Threads started meanwhile inherit that, so that Python's
// handlers always run on its main thread.
class SignalsBlocked {
   public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

   private:
    sigset_t before_;
};

void check(int threads, const std::vector<int>& cpus, int nice) {
    if (threads < 1 || threads > kMostThreads) {
        throw std::invalid_argument("threads must be between 1 and " + std::to_string(kMostThreads) + ", got " +
                                    std::to_string(threads));
    }
    if (nice < -20 || nice > 19) {
        throw std::invalid_argument("nice must be between -20 and 19, got " + std::to_string(nice));
    }
    for (const int cpu : cpus) {
        if (cpu < 0 || cpu >= CPU_SETSIZE) {
            throw std::invalid_argument("cpus must be between 0 and " + std::to_string(CPU_SETSIZE - 1) + ", got " +
                                        std::to_string(cpu));
        }
    }
}

}  // namespace

struct Pool::State {
    mutable std::mutex mutex;
    std::condition_variable changed;
    // Guarded by the mutex:
    std::map<std::int64_t, Share> shares;  // those with jobs of which pieces are left to take
    std::uint64_t turn = 0;  // what the share that had the last turn had used until then
    std::vector<std::int64_t> done;
    std::uint64_t submissions = 0;
    std::size_t started = 0;
    int start_error = 0;
    int event = -1;
    bool closing = false;

    std::vector<std::thread> threads;
    std::size_t thread_count = 0;

    ~State() {
        if (event >= 0) ::close(event);
    }

    // Call with the mutex held.
    void complete(std::int64_t job) {
        done.push_back(job);
        if (done.size() == 1) {
            const std::uint64_t one = 1;
            // Cannot fail: the counter is 0, since completed() reads it whenever it empties the list.
            while (::write(event, &one, sizeof one) < 0 && errno == EINTR) {
            }
        }
    }

    void start(int nice) {
        int error = 0;
        if (nice != 0) {
            // On Linux a nice value belongs to a thread.
            const auto thread = static_cast<id_t>(::syscall(SYS_gettid));
            if (::setpriority(PRIO_PROCESS, thread, nice) != 0) error = errno;
        }
        {
            const std::lock_guard<std::mutex> lock(mutex);
            if (error != 0) start_error = error;
            ++started;
        }
        changed.notify_all();
    }

    // Call with the mutex held, and at least one share.
    std::map<std::int64_t, Share>::iterator next_share() {
        auto least = shares.begin();
        for (auto share = std::next(least); share != shares.end(); ++share) {
            if (share->second.used < least->second.used) least = share;
        }
        return least;
    }

    void work() {
        const DefaultFloatingPoint environment;
        std::unique_lock<std::mutex> lock(mutex);
        while (true) {
            changed.wait(lock, [this] { return closing || !shares.empty(); });
            if (shares.empty()) return;
            const auto share = next_share();
            const auto front = share->second.waiting.begin();
            const std::shared_ptr<Job> job = front->second;
            const std::size_t first = job->taken;
            const std::size_t left = job->request.count() - first;
            const std::size_t count = left < job->piece ? left : job->piece;
            job->taken += count;
            turn = share->second.used;
            share->second.used += count * job->request.bytes_per_element();
            if (count == left) {
                share->second.waiting.erase(front);
                if (share->second.waiting.empty()) shares.erase(share);
            }

            lock.unlock();
            job->request.run(first, count);
            lock.lock();

            job->finished += count;
            if (job->finished == job->request.count()) complete(job->id);
        }
    }
};

Pool::Pool(int threads, const std::vector<int>& cpus, int nice) : state_(new State), owner_(::getpid()) {
    check(threads, cpus, nice);
    State& state = *state_;
    state.event = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (state.event < 0) throw failure(errno, "the event descriptor of the kernel threads");
    try {
        const SignalsBlocked blocked;
        for (int index = 0; index < threads; ++index) {
            state.threads.emplace_back([&state, nice] {
                state.start(nice);
                state.work();
            });
            const pthread_t handle = state.threads.back().native_handle();
            pthread_setname_np(handle, ("reduce-" + std::to_string(index)).c_str());
            if (!cpus.empty()) {
                const int cpu = cpus[static_cast<std::size_t>(index) % cpus.size()];
                cpu_set_t set;
                CPU_ZERO(&set);
                CPU_SET(cpu, &set);
                if (pthread_setaffinity_np(handle, sizeof set, &set) != 0) {
                    throw std::invalid_argument("cpu " + std::to_string(cpu) + " does not exist or may not be used");
                }
            }
        }
        std::unique_lock<std::mutex> lock(state.mutex);
        state.changed.wait(lock, [&state] { return state.started == state.threads.size(); });
        if (state.start_error != 0) {
            throw failure(state.start_error, "nice " + std::to_string(nice) + " of the kernel threads");
        }
    } catch (...) {
        close();
        throw;
    }
    state.thread_count = state.threads.size();
}

Pool::~Pool() {
    if (::getpid() != owner_) {
        static_cast<void>(state_.release());  // the threads are the parent's: joining would wait for ever
        return;
    }
    close();
}

int Pool::threads() const { return static_cast<int>(state_->thread_count); }

int Pool::descriptor() const {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    return state_->event;
}

void Pool::submit(std::int64_t job, Request request, std::int64_t priority, std::int64_t share) {
    const auto queued = std::make_shared<Job>(job, std::move(request));
    const bool shared = queued->piece < queued->request.count();
    {
        const std::lock_guard<std::mutex> lock(state_->mutex);
        if (state_->closing) throw std::invalid_argument("the pool is closed");
        const auto [place, is_new] = state_->shares.try_emplace(share);
        if (is_new) place->second.used = state_->turn;
        place->second.waiting.emplace(Place{priority, state_->submissions++}, queued);
    }
    if (shared) {
        state_->changed.notify_all();
    } else {
        state_->changed.notify_one();
    }
}

std::vector<std::int64_t> Pool::completed() {
    std::vector<std::int64_t> jobs;
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (!state_->done.empty() && state_->event >= 0) {
        std::uint64_t ignored = 0;
        while (::read(state_->event, &ignored, sizeof ignored) < 0 && errno == EINTR) {
        }
    }
    jobs.swap(state_->done);
    return jobs;
}

void Pool::close() {
    {
        const std::lock_guard<std::mutex> lock(state_->mutex);
        state_->closing = true;
        for (auto share = state_->shares.begin(); share != state_->shares.end();) {
            auto& waiting = share->second.waiting;
            for (auto place = waiting.begin(); place != waiting.end();) {
                place = place->second->taken == 0 ? waiting.erase(place) : std::next(place);
            }
            share = waiting.empty() ? state_->shares.erase(share) : std::next(share);
        }
    }
    state_->changed.notify_all();
    for (std::thread& thread : state_->threads) thread.join();
    state_->threads.clear();
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (state_->event >= 0) ::close(state_->event);
    state_->event = -1;
}

}  // namespace allreduced
