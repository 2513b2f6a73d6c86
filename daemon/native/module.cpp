// The Python module allreduced.daemon.kernels._native; _native.pyi says what it promises.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <exception>
#include <system_error>
#include <utility>
#include <vector>

#include "instruction_set.h"
#include "pool.h"
#include "request.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Addresses = std::vector<std::uintptr_t>;

void reduce(std::int64_t dtype, std::int64_t reduction, std::int64_t divisor, std::int64_t count,
            const Addresses& sources, std::uintptr_t target, std::int64_t partials, bool partial_target) {
    const allreduced::Request request(dtype, reduction, divisor, count, sources, target, {partials, partial_target});
    const nb::gil_scoped_release release;
    const allreduced::DefaultFloatingPoint environment;
    request.run(0, request.count());
}

}  // namespace

NB_MODULE(_native, module) {
    nb::set_leak_warnings(false);  // a pool that lives until the process ends is no defect
    module.doc() = "Native reductions and their worker threads.";
    allreduced::kernels();  // a bad ALLREDUCED_KERNELS_ISA fails the import

    // std::invalid_argument is a ValueError in nanobind already.
    nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
        try {
            std::rethrow_exception(pointer);
        } catch (const std::system_error& error) {
            // OSError picks the subclass by the number, such as PermissionError.
            const nb::tuple facts = nb::make_tuple(error.code().value(), error.what());
            PyErr_SetObject(PyExc_OSError, facts.ptr());
        }
    });

    module.def("instruction_set", &allreduced::instruction_set);
    module.def("reduce", &reduce, "dtype"_a, "reduction"_a, "divisor"_a, "count"_a, "sources"_a, "target"_a,
               nb::kw_only(), "partials"_a = 0, "partial_target"_a = false);

    nb::class_<allreduced::Pool>(module, "Pool")
        .def(nb::init<int, const std::vector<int>&, int>(), "threads"_a, "cpus"_a = std::vector<int>{}, "nice"_a = 0)
        .def_prop_ro("threads", &allreduced::Pool::threads)
        .def("fileno", &allreduced::Pool::descriptor)
        .def(
            "submit",
            [](allreduced::Pool& pool, std::int64_t job, std::int64_t dtype, std::int64_t reduction,
               std::int64_t divisor, std::int64_t count, const Addresses& sources, std::uintptr_t target,
               std::int64_t priority, std::int64_t partials, bool partial_target, std::int64_t share) {
                pool.submit(job,
                            allreduced::Request(dtype, reduction, divisor, count, sources, target,
                                                {partials, partial_target}),
                            priority, share);
            },
            "job"_a, "dtype"_a, "reduction"_a, "divisor"_a, "count"_a, "sources"_a, "target"_a, "priority"_a = 0,
            nb::kw_only(), "partials"_a = 0, "partial_target"_a = false, "share"_a = 0)
        .def("completed", &allreduced::Pool::completed)
        .def("close", &allreduced::Pool::close, nb::call_guard<nb::gil_scoped_release>());
}
